"""One case of `kvps_bench workers`: its sessions join, train and leave, and their costs are counted."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial

from kvps_aggregator.verify.chain import Chain, Unproved

from kvps.errors import KvpsError, ServerLost
from kvps.job import Job
from kvps.staleness import mode_name
from kvps_bench.cost import Cost, ScriptTimes, by_kind
from kvps_bench.crew import Member, Place
from kvps_bench.roles import model, temporary_job
from kvps_bench.sessions import Joined, Left
from kvps_bench.turns import CaseFailed

MODEL_BYTES = 1024
GUESTS = 5
ONCE = ("join", "leave", "evict")
"""Rare scripts, which do not belong to contributions."""
_SILENCE_MS = 3_600_000  # so that no worker is evicted and no lease lost just because two cores are busy
_LOOK_EVERY_S = 0.005
_FETCH_EVERY_S = 0.25


@dataclass(frozen=True)
class Setting:
    """One case: the number of sessions, the mode, how long it is measured, and how long a phase may take.

    If not `named`, sessions join under any free name, and only joining and leaving are measured.
    """

    workers: int
    staleness: int
    seconds: float
    limit_s: float
    named: bool

    @property
    def name(self) -> str:
        return f"{mode_name(self.staleness)}, {self.workers} workers{'' if self.named else ' under any name'}"


class WorkersCase:
    """One setting, and the measurements of its turns."""

    def __init__(
        self,
        place: Place,
        aggregator: Member,
        processes: Sequence[Member],
        setting: Setting,
        say: Callable[[str], None],
    ) -> None:
        self.setting = setting
        self.joining: list[float] = []
        self.leaving: list[float] = []
        self.costs: list[Cost] = []
        self.calls: list[Mapping[str, Sequence[float]]] = []
        self.script_s: list[Mapping[str, float]] = []  # script -> seconds per contribution, for each turn
        self.why = self.failure = ""
        self._place, self._say = place, say
        self._aggregator = aggregator
        self._processes = processes[: setting.workers]

    def turn(self) -> Sequence[float]:
        """Return the seconds of one contribution, or of joining. Raises CaseFailed if too slow, or a session failed."""
        self._say(self.setting.name)
        try:
            return [self._turn()]
        except (CaseFailed, ServerLost) as failure:
            self.why = str(failure) if isinstance(failure, CaseFailed) else "the server did not answer in time"
            left, _ = self._leave()  # the job is removed by now, which ends every session
            if any(one.remaining for one in left):
                raise KvpsError(f"{self.setting.name}: sessions go on though their job is removed") from failure
            error = next((f" ({one.error})" for one in left if one.error), "")
            self.failure = f"{self.setting.name}: {self.why}{error}."
            self._say(self.failure)
            raise CaseFailed(self.why) from failure

    def _turn(self) -> float:
        with self._job() as job:
            took = self._join(job)
            self.joining.append(took)
            if self.setting.named:
                self._begin(job)
                cost = self._steady(job)
                self.costs.append(cost)
                self._time_scripts(job)
                took = cost.at_s / cost.contributions
            left, leaving = self._leave()
            self._check(job, left)
            self.leaving.append(leaving)
            return took

    # -- joining and leaving

    @contextmanager
    def _job(self) -> Iterator[Job]:
        """Yield a job that is served while the block runs."""
        settings = {"workers": self.setting.workers, "staleness": self.setting.staleness}
        settings |= {"worker_timeout_ms": _SILENCE_MS, "lease_ms": _SILENCE_MS}
        try:
            with temporary_job(self._place, "unix", model(MODEL_BYTES), **settings) as job:
                self._aggregator("serve", job.name)
                yield job
        finally:
            self._aggregator("rest")

    def _join(self, job: Job) -> float:
        number, limit_s = self.setting.workers, self.setting.limit_s
        names = [f"w{i}" if self.setting.named else None for i in range(number)]
        for i, process in enumerate(self._processes):
            process.begin("join", job.name, names[i :: len(self._processes)], limit_s)
        joined: list[Joined] = [process.end() for process in self._processes]
        began = min(one.began for one in joined)
        if (there := sum(one.number for one in joined)) < number:
            raise CaseFailed(f"{there} of {number} had joined after {time.monotonic() - began:.0f} s")
        return max(one.ended for one in joined) - began

    def _leave(self) -> tuple[list[Left], float]:
        began = time.monotonic()
        for process in self._processes:
            process.begin("leave", self.setting.limit_s)
        return [process.end() for process in self._processes], time.monotonic() - began

    def _check(self, job: Job, left: Sequence[Left]) -> None:
        """Raise CaseFailed if sessions did not end well; KvpsError if the log is not what it must be."""
        if any(one.error for one in left):
            raise CaseFailed("a session failed")
        if remaining := sum(one.remaining for one in left):
            raise CaseFailed(f"{remaining} of {self.setting.workers} had not left after {self.setting.limit_s:g} s")
        self._await(lambda: job.state().settled, "not all that was pushed is committed")
        evicted = [fields["worker"] for _, fields in job.entries() if fields["kind"] == "evict"]
        if evicted:
            raise CaseFailed(f"{', '.join(evicted)} fell silent and had to go")
        state = job.state()
        chain = Chain(state.begin, state, job.layout.shards, job.config)
        try:
            for commit in job.log():
                chain.add(commit)
            chain.end(state)
        except Unproved as reason:
            raise KvpsError(f"{self.setting.name}: {reason}") from None
        acknowledged = sum(one.acknowledged for one in left)
        if not acknowledged == chain.contributions == sum(state.clock.values()):
            raise KvpsError(
                f"{self.setting.name}: {acknowledged} contributions were acknowledged, {chain.contributions} are "
                f"logged, and the clocks come to {sum(state.clock.values())}"
            )

    # -- training

    def _begin(self, job: Job) -> None:
        """Wait until workers have contributed twice on average, or for as long as a phase may take."""
        with suppress(CaseFailed):
            self._await(lambda: self._now(job).contributions >= 2 * self.setting.workers, "")

    def _steady(self, job: Job) -> Cost:
        before = self._at_commit(job)
        time.sleep(self.setting.seconds)
        return self._at_commit(job) - before

    def _at_commit(self, job: Job) -> Cost:
        """Return the counters right after the next commit, because in BSP contributions come in lumps."""
        version = partial(job.access.client.call, "HGET", job.access.keys.version, "version")
        before = version()
        self._await(lambda: version() != before, "no version was committed")
        return self._now(job)

    def _now(self, job: Job) -> Cost:
        pids = [process.process.pid or 0 for process in (self._aggregator, *self._processes)]
        return Cost.so_far(job, time.monotonic(), pids[:1], pids[1:])

    def _time_scripts(self, job: Job) -> None:
        times = ScriptTimes(job.access.client.url)
        try:
            with times.recording():
                before = self._at_commit(job)
                times.take()
                end = time.monotonic() + self.setting.seconds / 2
                while time.monotonic() < end:
                    time.sleep(min(_FETCH_EVERY_S, self.setting.seconds / 2))
                    times.fetch()
                contributions = (self._at_commit(job) - before).contributions
                calls = by_kind(times.take())
                for _ in range(GUESTS):
                    job.join("guest").leave(finished=False)
                    job.access.scripts.evict()
                guests = by_kind(times.take())
        finally:
            times.close()
        self.script_s.append({kind: sum(seconds) / contributions for kind, seconds in calls.items()})
        self.calls.append({**calls, **{kind: guests[kind] for kind in ONCE}})

    def _await(self, holds: Callable[[], bool], otherwise: str) -> None:
        """Poll until `holds()`. A wait that each commit ends would load the server like one worker more."""
        deadline = time.monotonic() + self.setting.limit_s
        while not holds():
            if time.monotonic() > deadline:
                raise CaseFailed(f"{otherwise} for {self.setting.limit_s:g} s")
            time.sleep(_LOOK_EVERY_S)
