"""`kvps_bench readers`: what a BSP round costs while processes of its host read the model, and how old it is then.

Each reader calls `Job.snapshot` again and again, as fast as it returns.
"""

from __future__ import annotations

import statistics
import threading
import time
from bisect import bisect
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from kvps_cli.output import say

from kvps_bench.crew import Lab, Member, crew, together
from kvps_bench.result import Bar, Figures, Row
from kvps_bench.roles import Aggregator, Role, Worker, model, temporary_job
from kvps_bench.round import Setting
from kvps_bench.turns import Times, in_turns

_LOOKED_AT = 64  # items of each version that a reader compares: all weights of a version are equal
_BAR, _MOST_RATIO = 10, 1.5
_ALONE, _READ = "alone", "read"


class Read(NamedTuple):
    """One read: the version, when it was there by this host's monotonic clock, and how many seconds it took."""

    version: int
    at: float
    took: float


class Trainer(Worker):
    """A worker that notes when it got which version."""

    def __init__(self, url: str, job: str, rank: int) -> None:
        super().__init__(url, job, rank)
        self._pulled: list[tuple[float, int]] = []

    def rounds(self, number: int) -> list[float]:
        took = []
        self._session.pull()
        self._pulled = [(time.monotonic(), self._session.version)]
        for _ in range(number):
            began = time.monotonic()
            self._session.push(self._gradients)
            self._session.pull()
            self._pulled.append((time.monotonic(), self._session.version))
            took.append(self._pulled[-1][0] - began)
        return took

    def pulled(self) -> list[tuple[float, int]]:
        """Return when which version was pulled in the last turn."""
        return self._pulled


class Reader(Role):
    """A reader of a job's whole model, again and again, on its own thread."""

    def __init__(self, url: str, name: str) -> None:
        super().__init__(url)
        self._job = self.store.job(name)
        self._over = threading.Event()
        self._reads: list[Read] = []
        self._torn = 0
        self._thread: threading.Thread | None = None

    def begin_reading(self) -> None:
        """Read until `end_reading`."""
        self._over.clear()
        self._reads, self._torn = [], 0
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        weights: dict[str, Any] = {}
        while not self._over.is_set():
            began = time.monotonic()
            version, weights = self._job.snapshot()  # the last one is in use until this one is there
            now = time.monotonic()
            self._reads.append(Read(version, now, now - began))
            (array,) = weights.values()
            looked_at = array[:: max(1, array.size // _LOOKED_AT)]
            self._torn += bool((looked_at != looked_at[0]).any())

    def end_reading(self) -> tuple[list[Read], int, int]:
        """Return the reads, how many were of no whole version, and how often this process has read Redis so far."""
        self._over.set()
        if self._thread:
            self._thread.join()
        return self._reads, self._torn, self._job.access.reader.fetched

    def close(self) -> None:
        self.end_reading()
        super().close()


def measure(lab: Lab, setting: Setting, count: int) -> Iterator[Row | Bar]:
    """Measure rounds without and with `count` readers over each transport."""
    for transport in lab.transports:
        say(f"{count} readers, {setting.nbytes / 1e6:g} MB, {transport}")
        times, read = _measured(lab, transport, setting, count)
        for case, each, readers in (("job alone", times[_ALONE], 0), (f"job, read by {count}", times[_READ], count)):
            more = {"readers": readers, "mean_ms": round(1000 * statistics.mean(each.seconds), 1)}
            yield Row(case, transport, setting.figures(), each, more)
        yield Row("a read meanwhile", transport, setting.figures(), read.times, read.figures)
        what = f"a round with {count} readers over one without, {transport}"
        yield Bar(_BAR, what, True, _MOST_RATIO, times[_READ].over(times[_ALONE]))


NOTES = (
    "Each reader calls job.snapshot() again and again. `lag` is how many versions a worker had pulled beyond the one "
    "that a read returned, when it returned: median, 90th percentile and greatest.",
    "`fetches` is how often a reader has read the arrays from Redis, all readers and turns together, the warm-up "
    "included. Over shm none does.",
    "Every version that was read was whole: the bench fails if the weights of one differ.",
)


def _measured(lab: Lab, transport: str, setting: Setting, count: int) -> tuple[dict[str, Times], _Reading]:
    url = lab.place.urls[transport]
    with temporary_job(lab.place, transport, model(setting.nbytes), workers=setting.workers) as job:
        trainers = [(Trainer, url, job.name, rank) for rank in range(setting.workers)]
        readers = [(Reader, url, job.name) for _ in range(count)]
        with crew((Aggregator, url, job.name), *trainers, *readers) as (_, *members):
            read = _Reading(members[: setting.workers], members[setting.workers :], setting.rounds(lab.quick))
            return in_turns({_ALONE: read.alone, _READ: read.by_all}, lab.turns), read


class _Reading:
    """The two cases, without readers and with them, and what the readers saw."""

    def __init__(self, workers: list[Member], readers: list[Member], rounds: int) -> None:
        self._workers, self._readers, self._rounds = workers, readers, rounds
        self._turns: list[list[list[Read]]] = []
        self._lags: list[int] = []
        self._fetches = 0

    def alone(self) -> list[float]:
        return together(self._workers, "rounds", self._rounds)[0]  # type: ignore[no-any-return]

    def by_all(self) -> list[float]:
        together(self._readers, "begin_reading")
        try:
            took = self.alone()
        finally:
            got = together(self._readers, "end_reading")
        assert not any(torn for _, torn, _ in got), "a reader saw half of a version"
        self._turns.append([reads for reads, _, _ in got])
        self._fetches = sum(fetches for _, _, fetches in got)
        pulled = self._workers[0]("pulled")
        self._lags += [_lag(read, pulled) for reads, _, _ in got for read in reads]
        return took

    @property
    def times(self) -> Times:
        return Times(tuple(tuple(read.took for reads in turn for read in reads) for turn in self._turns[1:]))

    @property
    def figures(self) -> Figures:
        counts = [sum(len(turn[i]) for turn in self._turns[1:]) for i in range(len(self._readers))]
        ordered = sorted(self._lags)
        lags = (ordered[len(ordered) // 2], ordered[len(ordered) * 9 // 10], ordered[-1])
        return {
            "readers": len(self._readers),
            "reads_each": f"{min(counts)} to {max(counts)}",
            "lag": "{} ({}, {})".format(*lags),
            "fetches": self._fetches,
        }


def _lag(read: Read, pulled: Sequence[tuple[float, int]]) -> int:
    """Return how many versions newer the last one was that a worker had pulled when the read returned."""
    index = bisect(pulled, (read.at, 1 << 62))
    return max(0, pulled[index - 1][1] - read.version) if index else 0
