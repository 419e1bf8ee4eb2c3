"""`kvps_bench workers`: how the cost of one contribution grows with the number of workers.

A few processes hold all the sessions, each session on its own thread. A session joins, then pulls and pushes a tiny
gradient as fast as it can, until it is told to leave. The server itself or the kernel counts everything, between two
commits. Every phase has a time limit, so that a case that is too slow is reported and not awaited.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial

from kvps_aggregator.verify.chain import Chain, Unproved

from kvps.connection.client import Client
from kvps.connection.sockets import SOCKET_TIMEOUT_S
from kvps.errors import InvalidSetting, KvpsError, ServerLost
from kvps.job import Job
from kvps.staleness import mode_name
from kvps.store import connect
from kvps_bench.cost import Cost, ScriptTimes, by_kind
from kvps_bench.crew import Member, Place, crew
from kvps_bench.result import Bar, Figures, Result, Row, machine
from kvps_bench.roles import Aggregator, model, temporary_job
from kvps_bench.sessions import Joined, Left, Sessions
from kvps_bench.turns import CaseFailed, Ratio, Times, in_turns

WORKERS, QUICK_WORKERS = "4,64,256,1000", "2,6"
_PROCESSES = 8
_MODEL_BYTES = 1024
_SILENCE_MS = 3_600_000  # so that no worker is evicted and no lease lost just because two cores are busy
_GUESTS = 5
_LOOK_EVERY_S = 0.005
_FETCH_EVERY_S = 0.25
_BAR = 14
_MOST_GROWTH, _MOST_MS, _MOST_JOIN_S = 3.0, 10.0, 20.0
_ONCE = ("join", "leave", "evict")  # rare scripts, which do not belong to contributions
_SHOWN = ("push", "plan, opens one", "plan, opens none", "ready, commits", "free", *_ONCE)

_NOTES = (
    f"At most {_PROCESSES} processes hold the sessions, over a Unix socket. The model has {_MODEL_BYTES} bytes, and no "
    "session computes anything. Each turn has its own job and sessions, and begins to count when each worker has "
    "contributed twice on average; so no turn is thrown away as a warm-up.",
    "Joining: all sessions begin to join at once, and train as soon as they have joined. Each has its own name; in "
    "jobs that measure only this, each takes any free name. Leaving: all sessions leave at once, too.",
    "Contributions: milliseconds from one committed contribution to the next, of all workers together. Bytes, time in "
    "scripts and CPU are per committed contribution. `script us` is the server's time in all scripts.",
    "Scripts: every call as the server timed it (SLOWLOG), in its own phase. `us a contribution` is the time of all "
    f"calls of that phase over its contributions. join and leave are of {_GUESTS} more workers, one after another, "
    "while all others train. evict looks for silent workers; an aggregator does so once a second by default.",
    "The worker timeout and the lease are an hour here, so heartbeats, renewals and looks for silent workers are in no "
    "other number. No process gives up on the server within a phase's time limit; the default is 10 s.",
    "After each turn the commit log is checked: it is one chain, holds what was acknowledged, and shows no eviction.",
)


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


def settings_of(counts: Sequence[int], modes: Sequence[int], seconds: float, limit_s: float) -> list[Setting]:
    """Return a setting for every mode and number of workers, from the fewest to the most."""
    return [
        Setting(count, mode, seconds, limit_s, named)
        for count in sorted(set(counts))
        for mode in modes
        for named in (True, False)
    ]


def measure(
    place: Place, settings: Sequence[Setting], turns: int, say: Callable[[str], None] = lambda _: None
) -> Result:
    """Measure all these settings. The server must be this benchmark's own."""
    most = max(s.workers for s in settings)
    with ExitStack() as stack:
        store = stack.enter_context(connect(_patient(place.urls["unix"], max(s.limit_s for s in settings))))
        _check_connections(store.client, most)
        makers = [(Sessions, store.url) for _ in range(min(_PROCESSES, most))]
        aggregator, *processes = stack.enter_context(crew((Aggregator, store.url), *makers))
        cases = {s: _Case(Place(store, {}), aggregator, processes, s, say) for s in settings}
        in_turns({s.name: case.turn for s, case in cases.items()}, turns, warm_up=False)
        where = machine(store.client)
    modes = dict.fromkeys(s.staleness for s in settings)
    rows = [row for part in (_joining, _contributions, _scripts) for case in cases.values() for row in part(case)]
    bars = [bar for mode in modes for bar in _bars([case for s, case in cases.items() if s.staleness == mode])]
    failures = [case.failure for case in cases.values() if case.failure]
    return Result("workers", turns, rows, bars, where, (*_NOTES, *failures))


def _patient(url: str, limit_s: float) -> str:
    """Return the URL with a timeout so long that no session gives up just because two cores are busy."""
    return f"{url}{'&' if '?' in url else '?'}socket_timeout={max(limit_s, SOCKET_TIMEOUT_S):g}"


def _check_connections(client: Client, workers: int) -> None:
    needed = 2 * workers + 100
    allowed = int(client.call("CONFIG", "GET", "maxclients")[1])
    if allowed < needed:
        raise InvalidSetting(
            f"--workers {workers}: the server takes {allowed} connections, and needs {needed}: raise ulimit -n"
        )


# -- one case -------------------------------------------------------------------------------------------------------


class _Case:
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
            with temporary_job(self._place, "unix", model(_MODEL_BYTES), **settings) as job:
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
        chain = Chain(state.begin, state, job.layout.shards)
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
                for _ in range(_GUESTS):
                    job.join("guest").leave(finished=False)
                    job.access.scripts.evict()
                guests = by_kind(times.take())
        finally:
            times.close()
        self.script_s.append({kind: sum(seconds) / contributions for kind, seconds in calls.items()})
        self.calls.append({**calls, **{kind: guests[kind] for kind in _ONCE}})

    def _await(self, holds: Callable[[], bool], otherwise: str) -> None:
        """Poll until `holds()`. A wait that each commit ends would load the server like one worker more."""
        deadline = time.monotonic() + self.setting.limit_s
        while not holds():
            if time.monotonic() > deadline:
                raise CaseFailed(f"{otherwise} for {self.setting.limit_s:g} s")
            time.sleep(_LOOK_EVERY_S)


# -- what was found -------------------------------------------------------------------------------------------------


def _figures(part: str, case: _Case) -> Figures:
    return {"part": part, "workers": case.setting.workers}


def _mode(case: _Case) -> str:
    return mode_name(case.setting.staleness)


def _joining(case: _Case) -> Iterator[Row]:
    if not case.setting.named:
        yield _row_of(case, "all join under any name", case.joining)
        return
    yield _row_of(case, "all join", case.joining)
    yield _row_of(case, "all leave", case.leaving)


def _row_of(case: _Case, what: str, seconds: Sequence[float]) -> Row:
    times = Times(tuple((s,) for s in seconds)) if seconds else None
    return Row(f"{_mode(case)}: {what}", "unix", _figures("joining", case), times, why=case.why)


def _contributions(case: _Case) -> Iterator[Row]:
    if not case.setting.named:
        return
    settings = _figures("contributions", case)
    if not case.costs:
        yield Row(_mode(case), "unix", settings, why=case.why)
        return
    times = Times(tuple((cost.at_s / cost.contributions,) for cost in case.costs))

    def median(of: Callable[[Cost], float]) -> float:
        return float(f"{statistics.median(of(cost) / cost.contributions for cost in case.costs):.4g}")

    more = {
        "contributions_per_s": round(1 / times.median, 1),
        "versions_per_s": round(statistics.median(cost.versions / cost.at_s for cost in case.costs), 1),
        "bytes_sent": median(lambda cost: cost.sent_bytes),
        "bytes_received": median(lambda cost: cost.received_bytes),
        "script_us": median(lambda cost: 1e6 * cost.script_s),
        "scripts": median(lambda cost: cost.script_calls),
        "server_cpu_us": median(lambda cost: 1e6 * cost.server_s),
        "aggregator_cpu_us": median(lambda cost: 1e6 * cost.aggregator_s),
        "workers_cpu_us": median(lambda cost: 1e6 * cost.workers_s),
    }
    yield Row(_mode(case), "unix", settings, times, more)


def _scripts(case: _Case) -> Iterator[Row]:
    for kind in _SHOWN:
        if times := _times_of(case, kind):
            more: dict[str, float | str] = {"greatest_ms": round(1000 * times.quantile(1), 3)}
            if kind not in _ONCE:
                spent = [script_s.get(kind, 0.0) for script_s in case.script_s]
                more["us_a_contribution"] = float(f"{1e6 * statistics.median(spent):.4g}")
            yield Row(f"{_mode(case)}: {kind}", "unix", _figures("scripts", case), times, more)


def _times_of(case: _Case, kind: str) -> Times | None:
    turns = tuple(tuple(calls[kind]) for calls in case.calls if calls.get(kind))
    return Times(turns) if turns else None


def _bars(cases: Sequence[_Case]) -> Iterator[Bar]:
    """Return the bars of one mode; `cases` go from the fewest workers to the most."""
    few, many, any_name = cases[0], cases[-2], cases[-1]
    mode, name = _mode(many), f"{many.setting.workers} workers"
    grown: dict[str, Callable[[Cost], float]] = {
        "bytes sent": lambda cost: cost.sent_bytes,
        "bytes received": lambda cost: cost.received_bytes,
        "time in scripts": lambda cost: cost.script_s,
    }
    for what, of in grown.items() if few is not many else ():
        said = f"{mode}: {what} a contribution, {many.setting.workers} workers over {few.setting.workers}"
        yield Bar(_BAR, said, True, _MOST_GROWTH, _growth(many.costs, few.costs, of), many.why or few.why)
    for kind in ("plan, opens one", "ready, commits"):
        times = _times_of(many, kind)
        yield Bar(_BAR, f"{mode}: ms of {kind}, {name}", True, _MOST_MS, _milliseconds(times), many.why)
    for how, case in (("", many), (" under any name", any_name)):
        joining = Ratio.of(case.joining) if case.joining else None
        yield Bar(_BAR, f"{mode}: seconds until all have joined{how}, {name}", True, _MOST_JOIN_S, joining, case.why)


def _growth(many: Sequence[Cost], few: Sequence[Cost], of: Callable[[Cost], float]) -> Ratio | None:
    turns = list(zip(many, few, strict=False))  # one case may have failed in a later turn
    each = [(of(mine) / mine.contributions) / (of(its) / its.contributions) for mine, its in turns]
    return Ratio.of(each) if each else None


def _milliseconds(times: Times | None) -> Ratio | None:
    return Ratio.of([1000 * second for second in times.seconds]) if times else None
