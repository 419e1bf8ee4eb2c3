"""Reads once all that is recorded of a job's time: what each lane did, and which push went into which version.

The spans are those of the traces. Which contribution went into which version is in the commit log alone, by worker and
round. Old entries of both are dropped or moved away, so that a lane may begin in the middle of a job.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

from kvps.errors import CorruptData, InvalidSetting, JobError
from kvps.history.evaluations import Evaluation
from kvps.history.events import Event, EventLog
from kvps.job import Job
from kvps.parsing import LARGEST
from kvps_monitor.spans import Span, Traces, spans

_LATEST_US = 8_836_000_000_000_000  # about the year 2250: nanoseconds of a later time do not fit viewers' 64 bits
_AROUND_US = 1_000_000  # a worker joins shortly before its first span, and leaves shortly after its last one
_MARKS = ("join", "leave", "evict")
EVALUATIONS = "evaluated versions"
"""The name of their lane in traces. No worker has it, as it has a space."""


class Block(NamedTuple):
    """One iteration of a worker, or a shard's work on one version: the spans of its phases, one behind the other.

    number   the worker's round, or the shard's version
    version  the version that the worker pulled, or that the shard made
    loss     what the worker said; None if it said none
    """

    lane: str
    number: int
    version: int
    spans: tuple[Span, ...]
    loss: float | None = None

    @property
    def start_us(self) -> float:
        """When it began, by the server's clock, in microseconds since 1970."""
        return self.spans[0].start_us

    @property
    def end_us(self) -> float:
        """When it ended; see `start_us`."""
        return self.spans[-1].end_us

    @property
    def facts(self) -> dict[str, int]:
        """What viewers show beside each span of a worker's iteration."""
        unit = self.spans[0].unit
        known = {"round": self.number, "version": self.version, "clock": self.spans[0].clock}
        return known if unit is None else known | {"unit": unit}

    def phase(self, name: str) -> Span | None:
        """Return the span of a phase; None if the phase took no time."""
        return next((span for span in self.spans if span.phase == name), None)


class Arrow(NamedTuple):
    """What one lane handed to another: `kind` "push" leads from a worker's push to a shard's version, `kind` "fetch"
    from the commit of a version to a worker's fetch of it."""

    kind: str
    worker: Block
    shard: Block
    span: Span


class Mark(NamedTuple):
    """A worker joined, left or was evicted (`kind`: join, leave, evict), at microseconds of the server's clock."""

    worker: str
    kind: str
    at_us: int


class Absence(NamedTuple):
    """The time in which a worker was not in the job: from the server's microsecond `start_us` to `end_us`, infinite
    where that is not known; `why` is "not yet joined", "left" or "evicted"."""

    worker: str
    why: str
    start_us: float
    end_us: float


class Taken(NamedTuple):
    """The version that a contribution went into, and its staleness then."""

    version: int
    staleness: int


@dataclass(frozen=True)
class Recording:
    """What is recorded of a job, or of a part of its time.

    workers  worker -> its iterations, oldest first; workers by rank
    shards   the blocks of each shard, oldest first
    taken    (worker, round) -> the version that took the contribution, as far as the log has it
    absences when a worker was not in the job, as far as the log has it
    fates    the entries of the log that say what became of experience: of a version that was trained on it, and of what
             was dropped, by a learner
    evaluations  those whose figures were reported in this time, oldest first. When one began is recorded nowhere
    window   the moments between which this is, in microseconds of the server's clock; None for all of it. Blocks that
             lie only partly in it are here as a whole
    """

    job: str
    mode: str
    workers: Mapping[str, Sequence[Block]]
    shards: Sequence[Sequence[Block]]
    taken: Mapping[tuple[str, int], Taken]
    marks: Sequence[Mark]
    absences: Sequence[Absence] = ()
    fates: Sequence[Event] = ()
    evaluations: Sequence[Evaluation] = ()
    window: tuple[float, float] | None = None

    @property
    def blocks(self) -> Iterator[Block]:
        """The blocks of all lanes."""
        for lane in (*self.workers.values(), *self.shards):
            yield from lane

    @cached_property
    def start_us(self) -> float:
        """When the first block began, in microseconds of the server's clock."""
        return min(block.start_us for block in self.blocks)

    @cached_property
    def end_us(self) -> float:
        """When the last block ended, in microseconds of the server's clock."""
        return max(block.end_us for block in self.blocks)

    @cached_property
    def origin_us(self) -> float:
        """The time that traces count from, in microseconds of the server's clock: nothing that is here was before."""
        marks = (float(mark.at_us) for mark in self.marks)
        return min([self.start_us, *marks, *(1000.0 * evaluation.at_ms for evaluation in self.evaluations)])

    @property
    def iterations(self) -> int:
        """How many iterations the workers have."""
        return sum(map(len, self.workers.values()))

    @property
    def versions(self) -> list[int]:
        """The versions that a shard has a block of, in their order."""
        return sorted({block.number for lane in self.shards for block in lane})

    def arrows(self) -> Iterator[Arrow]:
        """Yield the arrows between the blocks that are here. A version can be fetched once its last shard has
        committed, so its arrow comes from there."""
        made = [{block.number: block for block in lane} for lane in self.shards]
        for lane in self.workers.values():
            for block in lane:
                push, fetch = block.phase("push"), block.phase("fetch")
                taken = self.taken.get((block.lane, block.number))
                if push and taken:
                    yield from (Arrow("push", block, s[taken.version], push) for s in made if taken.version in s)
                sources = [shard[block.version] for shard in made if block.version in shard]
                if fetch and sources:
                    yield Arrow("fetch", block, max(sources, key=lambda source: source.end_us), fetch)

    def curves(self, worker: str) -> dict[str, list[tuple[float, float]]]:
        """Return the finite losses of a worker, and the staleness of its contributions, each with the microsecond in
        which its iteration ended."""
        lane = self.workers[worker]
        taken = [(block.end_us, self.taken.get((worker, block.number))) for block in lane]
        return {
            "loss": [(b.end_us, b.loss) for b in lane if b.loss is not None and math.isfinite(b.loss)],
            "staleness": [(at_us, found.staleness) for at_us, found in taken if found],
        }

    def last(self, seconds: float) -> Recording:
        """Return the blocks of the last `seconds`, or all of them."""
        return self.between(max(self.start_us, self.end_us - 1e6 * seconds), self.end_us)

    def between(self, start_us: float, end_us: float) -> Recording:
        """Return the blocks that have any time between two moments of the server's clock."""

        def within(lane: Sequence[Block]) -> list[Block]:
            return [block for block in lane if block.end_us > start_us and block.start_us < end_us]

        return replace(
            self,
            workers={worker: within(lane) for worker, lane in self.workers.items()},
            shards=[within(lane) for lane in self.shards],
            marks=[mark for mark in self.marks if start_us <= mark.at_us <= end_us],
            fates=[e for e in self.fates if start_us <= 1000 * e.at_ms <= end_us],
            evaluations=[e for e in self.evaluations if start_us <= 1000 * e.at_ms <= end_us],
            window=(start_us, end_us),
        )

    def making(self, first: int | None, last: int | None) -> Recording:
        """Return the blocks of the time in which these versions were made: from when the first of the iterations began
        whose contributions went into them, until the last shard had committed them. An iteration whose version is not
        known belongs to the version after the one that it pulled. Raises InvalidSetting if there are none."""
        low, high = first or 0, LARGEST if last is None else last
        found = [block for block in self.blocks if low <= self._version_of(block) <= high]
        if not found:
            have = f"versions {self.versions[0]} to {self.versions[-1]}" if self.versions else "no version"
            wanted = f"from {low} on" if last is None else f"{low} to {high}"
            raise InvalidSetting(f"job {self.job} has no spans of versions {wanted}: its traces have {have}")
        return self.between(min(b.start_us for b in found), max(b.end_us for b in found))

    def newest_rounds(self, rounds: int) -> Recording:
        """Return about the last `rounds` rounds of the slowest worker, up to when the first of the workers ended: in
        ASP the fast workers may be done long before the slow one. The last evaluation comes after all rounds: the part
        goes on until then, unless it would be more than twice as long."""
        lanes = [lane for lane in self.workers.values() if lane]
        if not lanes:  # a learner publishes the job: the last versions
            return self.making(self.versions[-rounds:][0], None)
        if (end := _common_end(lanes)) is None:  # one left before another one came: those that were there at the end
            newest = max(lanes, key=lambda lane: lane[-1].end_us)
            lanes = [lane for lane in lanes if lane[-1].end_us > newest[-rounds:][0].start_us]
            end = _common_end(lanes) or self.end_us
        slowest = max(lanes, key=lambda lane: (lane[-1].end_us - lane[0].start_us) / len(lane))
        begun = [block.start_us for block in slowest if block.start_us < end][-rounds:]
        start = begun[0] if begun else self.start_us
        last_us = 1000 * self.evaluations[-1].at_ms if self.evaluations else 0
        return self.between(start, last_us if end < last_us <= end + (end - start) else end)

    def _version_of(self, block: Block) -> int:
        if block.lane not in self.workers:
            return block.number
        taken = self.taken.get((block.lane, block.number))
        return taken.version if taken else block.version + 1


def record(job: Job) -> Recording:
    """Read what is recorded of a job. Raises JobError if there are no spans; JobNotFound, CorruptData, ServerLost."""
    members = job.state().members.values()
    iterations, versions = Traces(job).read(m.worker for m in sorted(members, key=lambda m: m.rank))
    workers = {}
    for worker, found in iterations.items():
        losses = {i.round: i.loss for i in found}
        blocks = _blocks(spans(found), lambda span: span.round)
        workers[worker] = [block._replace(loss=losses[block.number]) for block in blocks]
    shards = [_blocks(spans(made), lambda span: span.version) for made in versions.values()]
    events = EventLog(job.access.client, job.access.keys).newest(0)
    all_of_it = Recording(job.name, job.config.mode, workers, shards, _taken(events), [])
    if job.config.metadata.publishes:
        if not all_of_it.versions:
            raise JobError(f"job {job.name} has no spans yet: its learner has published no version")
    elif not all_of_it.iterations:
        raise JobError(f"job {job.name} has no spans yet: a worker tells of an iteration with the push after it")
    low, high = all_of_it.start_us, all_of_it.end_us
    reports = [Evaluation(**e.facts, at_ms=e.at_ms) for e in events if e.kind == "evaluate"]
    evaluations = sorted((e for e in reports if 1000 * e.at_ms >= low - _AROUND_US), key=lambda e: e.at_ms)
    latest = max([high, *(1000 * e.at_ms for e in evaluations)])
    if latest > _LATEST_US:
        raise CorruptData(
            f"job {job.name} has a time after the year 2250 ({latest:.0f} us): no process of it wrote that"
        )
    marks = [Mark(e.facts["worker"], e.kind, 1000 * e.at_ms) for e in events if e.kind in _MARKS]
    near = [m for m in marks if low - _AROUND_US <= m.at_us <= high + _AROUND_US]
    fates = [e for e in events if e.kind in ("stale", "rejected") or "trained" in e.facts]
    fates = [e for e in fates if low <= 1000 * e.at_ms <= high + _AROUND_US]
    return replace(all_of_it, marks=near, absences=list(_absences(marks)), fates=fates, evaluations=evaluations)


def _absences(marks: Sequence[Mark]) -> Iterator[Absence]:
    """Yield when workers were not in the job. A log of which the beginning was moved away begins with any mark."""
    gone: dict[str, tuple[str, float]] = {mark.worker: ("not yet joined", -math.inf) for mark in marks}
    for worker, kind, at_us in marks:
        if kind != "join":
            gone[worker] = ("left" if kind == "leave" else "evicted"), float(at_us)
        elif worker in gone:
            why, since_us = gone.pop(worker)
            yield Absence(worker, why, since_us, float(at_us))
    for worker, (why, since_us) in gone.items():
        yield Absence(worker, why, since_us, math.inf)


def _blocks(lane: Iterator[Span], number: Callable[[Span], int]) -> list[Block]:
    """Return the blocks that spans of one lane belong to."""
    grouped = [(n, tuple(each)) for n, each in groupby(lane, number)]
    return [Block(each[0].lane, n, each[0].version, each) for n, each in grouped]


def _taken(events: Sequence[Event]) -> dict[tuple[str, int], Taken]:
    """Return what the log says of each contribution. After a loss of versions the last commit counts."""
    return {
        (c["worker"], c["round"]): Taken(event.facts["version"], c["staleness"])
        for event in events
        if event.kind == "commit"
        for c in event.facts["contributions"]
    }


def _common_end(lanes: Sequence[Sequence[Block]]) -> float | None:
    """Return when the first of the lanes ends, in microseconds; None if another one begins only then."""
    end = min(lane[-1].end_us for lane in lanes)
    return end if end > max(lane[0].start_us for lane in lanes) else None
