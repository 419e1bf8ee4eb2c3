"""Counts what happens to one job. Each entry of a log or a trace is given to it once. Pure."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import accumulate

from kvps.history.events import Event
from kvps.parsing import whole
from kvps.protocol.job_state import Member
from kvps.protocol.phases import WORKER_PHASES
from kvps_monitor.spans import Iteration, ShardVersion, WholeVersions

STALENESS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
"""Upper bounds of the buckets of staleness, in versions."""
SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
"""Upper bounds of the buckets of a shard's phases, in seconds."""

FATES = ("trained", "stale", "rejected")
"""What becomes of an item of experience."""


class Histogram:
    """Values counted by the first bound that is no lower; what is above all bounds is counted last."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def cumulative(self) -> list[tuple[float, int]]:
        """Return each bound and how many values are not above it; the last bound is infinite."""
        bounds = map(float, (*self.bounds, math.inf))
        return list(zip(bounds, accumulate(self.counts), strict=True))


class WorkerTotals:
    """What one worker has done.

    contributions  its clock, which never goes back here: a restart of Redis may lose what Prometheus has seen
    events         kind -> number: join, leave, evict, reject
    """

    def __init__(self) -> None:
        self.contributions = 0
        self.events: Counter[str] = Counter()
        self.staleness = Histogram(STALENESS)
        self.seconds = dict.fromkeys(WORKER_PHASES, 0.0)
        self.iterations = self.pulled = self.pushed = 0
        self.late = 0
        self.loss: float | None = None
        self._dropped: tuple[str, int] = ("", 0)

    def add(self, iteration: Iteration) -> None:
        """Count an iteration."""
        self.iterations += 1
        self.pulled += iteration.pulled
        self.pushed += iteration.pushed
        for phase, milliseconds in iteration.phases.items():
            self.seconds[phase] += milliseconds / 1000
        if iteration.loss is not None:
            self.loss = iteration.loss

    def look_at(self, member: Member) -> None:
        """Take over what the job says of the worker. Each incarnation counts its own late contributions anew. Raises
        CorruptData."""
        self.contributions = max(self.contributions, member.clock)
        dropped = whole(member.process.get("dropped", 0), f"worker {member.worker!r}: dropped")
        incarnation, before = self._dropped
        self.late += max(0, dropped - (before if incarnation == member.incarnation else 0))
        self._dropped = (member.incarnation, dropped)


class ShardTotals:
    """What the holders of one shard have done. `phases` has the seconds of each phase of its versions."""

    def __init__(self) -> None:
        self.phases: defaultdict[str, Histogram] = defaultdict(lambda: Histogram(SECONDS))
        self.received = self.stored = 0
        self.takes = 0

    def add(self, version: ShardVersion) -> None:
        """Count a version."""
        self.received += version.received
        self.stored += version.stored
        for phase, milliseconds in version.phases.items():
            self.phases[phase].add(milliseconds / 1000)


class JobTotals:
    """What has happened to a job.

    missed         versions whose commit was gone before it was read
    gradient_norm  of the newest version of which all shards' parts are known; None if a learner publishes the job
    learner_loss   what the learner that publishes the job said last
    fates          how many items of experience had which fate, see `FATES`
    """

    def __init__(self, shards: int, begin: int) -> None:
        """The job has so many shards, and its log begins after the version `begin`."""
        self.workers: defaultdict[str, WorkerTotals] = defaultdict(WorkerTotals)
        self.shards = [ShardTotals() for _ in range(shards)]
        self.versions = begin
        self.missed = self.recoveries = self.units_done = self.backups = 0
        self.gradient_norm: float | None = None
        self.learner_loss: float | None = None
        self.fates = dict.fromkeys(FATES, 0)
        self._next = begin + 1
        self._norms = WholeVersions(shards)

    def add_events(self, events: Iterable[Event]) -> None:
        """Count events of the log."""
        for event in events:
            if event.kind == "commit":
                self._add_commit(event)
            elif event.kind == "recover":
                self.recoveries += 1
            elif event.kind in ("join", "leave", "evict", "reject"):
                self.workers[event.facts["worker"]].events[event.kind] += 1

    def _add_commit(self, event: Event) -> None:
        version = event.facts["version"]
        self.missed += max(0, version - self._next)
        self._next = version + 1
        self.learner_loss = event.facts.get("loss") if "by" in event.facts else None
        for contribution in event.facts["contributions"]:
            self.workers[contribution["worker"]].staleness.add(contribution["staleness"])

    def add_iterations(self, worker: str, iterations: Iterable[Iteration]) -> None:
        """Count iterations of a worker, oldest first."""
        totals = self.workers[worker]
        for iteration in iterations:
            totals.add(iteration)

    def add_versions(self, shard: int, versions: Sequence[ShardVersion]) -> None:
        """Count versions of a shard, oldest first."""
        for version in versions:
            self.shards[shard].add(version)
        for figures in self._norms.add(versions):
            self.gradient_norm = figures.norm if figures.contributions else None
