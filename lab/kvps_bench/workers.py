"""`kvps_bench workers`: how the cost of one contribution grows with the number of workers.

A few processes hold all the sessions, each session on its own thread. A session joins, then pulls and pushes a tiny
gradient as fast as it can, until it is told to leave. The server itself or the kernel counts everything, between two
commits. Every phase has a time limit, so that a job that is too slow is reported and not awaited.
"""

from __future__ import annotations

import resource
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
from kvps_aggregator.verify.chain import Chain, Unproved
from kvps_cli.output import say

from kvps.arrays.layout import DTYPE
from kvps.connection.client import Client
from kvps.connection.sockets import SOCKET_TIMEOUT_S
from kvps.connection.urls import redacted
from kvps.errors import InvalidSetting, JobNotFound, KvpsError
from kvps.job import Job
from kvps.staleness import mode_name
from kvps.store import connect
from kvps_bench.cost import Cost
from kvps_bench.crew import Lab, Member, Place, crew
from kvps_bench.result import Bar, Figures, Row
from kvps_bench.roles import Aggregator, Role, model, temporary_job
from kvps_bench.turns import Ratio, Times, in_turns

WORKERS, QUICK_WORKERS = "4,64,256,1000", "2,6"
_PROCESSES = 8
_MODEL_BYTES = 1024
_SILENCE_MS = 3_600_000  # so that no worker is evicted and no lease lost just because two cores are busy
_LOOK_EVERY_S = 0.005
_STACK_BYTES = 512 << 10
_BAR, _MOST_GROWTH, _MOST_JOIN_S = 14, 3.0, 20.0

NOTES = (
    f"At most {_PROCESSES} processes hold the sessions, over a Unix socket. The model has {_MODEL_BYTES} bytes, and no "
    "session computes anything. Each turn has its own job and sessions, and begins to count when each worker has "
    "contributed twice on average; so no turn is thrown away as a warm-up.",
    "Joining: all sessions begin to join at once, and train as soon as they have joined. All leave at once, too.",
    "Contributions: milliseconds from one committed contribution to the next, of all workers together. Bytes, time in "
    "scripts and CPU are per committed contribution. `script us` is the server's time in all scripts.",
    "The worker timeout and the lease are an hour here, so heartbeats, renewals and looks for silent workers are in no "
    "number. No process gives up on the server within a phase's time limit; the default is 10 s.",
    "After each turn the commit log is checked: it is one chain, and holds what was acknowledged.",
)


class Joined(NamedTuple):
    """How many sessions of one process have joined, when the first began to join, and when the last had joined."""

    number: int
    began: float
    ended: float


class Left(NamedTuple):
    """How many sessions of one process still run, how many contributions were acknowledged, and the first error."""

    remaining: int
    acknowledged: int
    error: str


class Sessions(Role):
    """One process with many sessions, each on its own thread."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        threading.stack_size(_STACK_BYTES)
        self._threads: list[threading.Thread] = []
        self._over = threading.Event()

    def join(self, name: str, workers: Sequence[str], limit_s: float) -> Joined:
        """Start a session for each worker. Return when all have joined, one failed, or after `limit_s`."""
        self._over.clear()
        self._errors: list[str] = []
        self._acknowledged: list[int] = []
        self._joined: list[float] = []
        self._one_more = threading.Semaphore(0)
        job = self.store.job(name)
        self._threads = [threading.Thread(target=self._work, args=(job, w), daemon=True) for w in workers]
        began = time.monotonic()
        for thread in self._threads:
            thread.start()
        for _ in self._threads:
            if self._errors or not self._one_more.acquire(timeout=max(0, began + limit_s - time.monotonic())):
                break
        return Joined(len(self._joined), began, max(self._joined, default=began))

    def _work(self, job: Job, worker: str) -> None:
        try:
            session = job.join(worker)
            self._joined.append(time.monotonic())
            self._one_more.release()
            with session:
                gradient = {p.name: np.ones(p.shape, DTYPE) for p in job.layout.parameters}
                while not self._over.is_set():
                    session.pull()
                    if not self._over.is_set():
                        session.push(gradient)
            self._acknowledged.append(session.clock)
        except JobNotFound:
            self._one_more.release()  # the job was removed because another session failed
        except Exception as error:  # any error is reported
            reason = str(error).replace(redacted(self.store.url), "the server")
            self._errors.append(f"{type(error).__name__}: {reason}")
            self._one_more.release()

    def leave(self, limit_s: float) -> Left:
        """Make all sessions leave; return when all have left, or after `limit_s`."""
        self._over.set()
        deadline = time.monotonic() + limit_s
        for thread in self._threads:
            thread.join(max(0, deadline - time.monotonic()))
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        return Left(len(self._threads), sum(self._acknowledged), next(iter(self._errors), ""))


@dataclass(frozen=True)
class Setting:
    """The number of sessions, the mode, how long contributions are counted, and how long a phase may take."""

    workers: int
    staleness: int
    seconds: float
    limit_s: float

    @property
    def mode(self) -> str:
        return mode_name(self.staleness)


class Case:
    """One setting, and the measurements of its turns."""

    def __init__(self, place: Place, aggregator: Member, processes: Sequence[Member], setting: Setting) -> None:
        self.setting = setting
        self.joining: list[float] = []
        self.leaving: list[float] = []
        self.costs: list[Cost] = []
        self._place, self._aggregator = place, aggregator
        self._processes = processes[: setting.workers]

    def turn(self) -> list[float]:
        """Return the seconds of one contribution. Raises KvpsError if it is too slow, or a session failed."""
        with self._job() as job:
            self.joining.append(self._join(job))
            self._await(lambda: self._now(job).contributions >= 2 * self.setting.workers, "few contributions came")
            before = self._at_commit(job)
            time.sleep(self.setting.seconds)
            cost = self._at_commit(job) - before
            began = time.monotonic()
            for process in self._processes:
                process.begin("leave", self.setting.limit_s)
            left = [process.end() for process in self._processes]
            self.leaving.append(time.monotonic() - began)
            self._check(job, left)
        self.costs.append(cost)
        return [cost.at_s / cost.contributions]

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
        names = [f"w{number}" for number in range(self.setting.workers)]
        for i, process in enumerate(self._processes):
            process.begin("join", job.name, names[i :: len(self._processes)], self.setting.limit_s)
        joined: list[Joined] = [process.end() for process in self._processes]
        began = min(one.began for one in joined)
        if (there := sum(one.number for one in joined)) < len(names):
            raise KvpsError(f"{there} of {len(names)} had joined after {time.monotonic() - began:.0f} s")
        return max(one.ended for one in joined) - began

    def _check(self, job: Job, left: Sequence[Left]) -> None:
        """Raise KvpsError if sessions did not end well, or the log is not what it must be."""
        if error := next((one.error for one in left if one.error), ""):
            raise KvpsError(f"a session failed: {error}")
        if remaining := sum(one.remaining for one in left):
            raise KvpsError(f"{remaining} of {self.setting.workers} had not left after {self.setting.limit_s:g} s")
        self._await(lambda: job.state().settled, "not all that was pushed is committed")
        state = job.state()
        chain = Chain(state.begin, state, job.layout.shards, job.config, job.config)
        try:
            for commit in job.log():
                chain.add(commit)
            chain.end(state)
        except Unproved as reason:
            raise KvpsError(str(reason)) from None
        acknowledged = sum(one.acknowledged for one in left)
        if acknowledged != chain.contributions:
            raise KvpsError(f"{acknowledged} contributions were acknowledged, and {chain.contributions} are logged")

    def _at_commit(self, job: Job) -> Cost:
        """Return the counters right after the next commit, because in BSP contributions come in lumps."""
        version = partial(job.access.client.call, "HGET", job.access.keys.version, "version")
        before = version()
        self._await(lambda: version() != before, "no version was committed")
        return self._now(job)

    def _now(self, job: Job) -> Cost:
        pids = [process.process.pid or 0 for process in (self._aggregator, *self._processes)]
        return Cost.so_far(job, time.monotonic(), pids[:1], pids[1:])

    def _await(self, holds: Callable[[], bool], otherwise: str) -> None:
        """Poll until `holds()`. A wait that each commit ends would load the server like one worker more."""
        deadline = time.monotonic() + self.setting.limit_s
        while not holds():
            if time.monotonic() > deadline:
                raise KvpsError(f"{otherwise} for {self.setting.limit_s:g} s")
            time.sleep(_LOOK_EVERY_S)


def measure(lab: Lab, settings: Sequence[Setting]) -> Iterator[Row | Bar]:
    """Measure all these settings. The server must be this benchmark's own."""
    most = max(s.workers for s in settings)
    with ExitStack() as stack:
        store = stack.enter_context(connect(_patient(lab.place.urls["unix"], max(s.limit_s for s in settings))))
        _check_connections(store.client, most)
        makers = [(Sessions, store.url) for _ in range(min(_PROCESSES, most))]
        aggregator, *processes = stack.enter_context(crew((Aggregator, store.url), *makers))
        cases = [Case(Place(store, {}), aggregator, processes, setting) for setting in settings]
        say(", ".join(f"{s.mode} of {s.workers}" for s in settings))
        in_turns({case.setting: case.turn for case in cases}, lab.turns, warm_up=False)
    for part in (_joining, _contributions):
        for case in cases:
            yield from part(case)
    for mode in dict.fromkeys(case.setting.mode for case in cases):
        yield from _bars([case for case in cases if case.setting.mode == mode])


def _patient(url: str, limit_s: float) -> str:
    """Return the URL with a timeout so long that no session gives up just because two cores are busy."""
    return f"{url}{'&' if '?' in url else '?'}socket_timeout={max(limit_s, SOCKET_TIMEOUT_S):g}"


def _check_connections(client: Client, workers: int) -> None:
    needed, allowed = 2 * workers + 100, int(client.call("CONFIG", "GET", "maxclients")[1])
    if allowed < needed:
        raise InvalidSetting(
            f"--workers {workers}: the server takes {allowed} connections, and needs {needed}: raise ulimit -n"
        )


def _joining(case: Case) -> Iterator[Row]:
    for what, seconds in (("all join", case.joining), ("all leave", case.leaving)):
        settings: Figures = {"part": "joining", "workers": case.setting.workers}
        yield Row(f"{case.setting.mode}: {what}", "unix", settings, Times(tuple((s,) for s in seconds)))


def _contributions(case: Case) -> Iterator[Row]:
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
    yield Row(case.setting.mode, "unix", {"part": "contributions", "workers": case.setting.workers}, times, more)


def _bars(cases: Sequence[Case]) -> Iterator[Bar]:
    """Return the bars of one mode; `cases` go from the fewest workers to the most."""
    few, many = cases[0], cases[-1]
    grown: dict[str, Callable[[Cost], float]] = {
        "bytes sent": lambda cost: cost.sent_bytes,
        "bytes received": lambda cost: cost.received_bytes,
        "time in scripts": lambda cost: cost.script_s,
    }
    for what, of in grown.items() if few is not many else ():
        label = f"{many.setting.mode}: {what} a contribution, {many.setting.workers} workers over {few.setting.workers}"
        turns = zip(many.costs, few.costs, strict=True)
        each = [(of(mine) / mine.contributions) / (of(its) / its.contributions) for mine, its in turns]
        yield Bar(_BAR, label, True, _MOST_GROWTH, Ratio.of(each))
    label = f"{many.setting.mode}: seconds until all have joined, {many.setting.workers} workers"
    yield Bar(_BAR, label, True, _MOST_JOIN_S, Ratio.of(many.joining))
