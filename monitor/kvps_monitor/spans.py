"""Reads what workers and aggregators have recorded: how long each phase of their work took, by the server's clock."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from kvps.history.log_stream import entries_after
from kvps.job import Job
from kvps.parsing import Fields, number, whole
from kvps.protocol.job_state import Commit, Entry
from kvps.protocol.phases import SHARD_PHASES, WORKER_PHASES

_LONGEST_MS = 1e10
_LATEST_US = 253_370_764_800_000_000  # the year 9999

Phases = Mapping[str, float]


class Iteration(NamedTuple):
    """One iteration of a worker, which its push ended. Times are of the server's clock, in microseconds since 1970.

    entry    the id of its entry in the stream
    at_us    when it began; None if its worker did not know the time yet
    phases   phase -> milliseconds; all zero without spans
    version  the version of the weights that it pulled
    clock    the clock as which its contribution was acknowledged; 0 without spans
    pulled, pushed  bytes, as they are encoded
    unit     the unit of data that it used, if the job hands out units
    loss     None if the worker said none; it may be NaN
    """

    worker: str
    entry: str
    round: int
    version: int
    clock: int
    at_us: int | None
    phases: Phases
    pulled: int
    pushed: int
    unit: int | None
    loss: float | None

    @classmethod
    def of(cls, worker: str, entry: Entry) -> Iteration:
        """Parse an entry of the worker's trace. Raises CorruptData."""
        id, fields = entry
        where = f"the trace of worker {worker!r}"
        f = Fields(fields, where)
        loss = fields.get("loss")
        return cls(
            worker=worker,
            entry=id,
            round=f.whole("round"),
            version=f.whole("version"),
            clock=f.whole("clock", default=0),
            at_us=f.whole("at", high=_LATEST_US) if "at" in fields else None,
            phases=_phases(f, WORKER_PHASES, where),
            pulled=f.whole("pulled", default=0),
            pushed=f.whole("pushed", default=0),
            unit=f.whole("unit") if "unit" in fields else None,
            loss=None if loss is None else number(loss, f"{where}: loss", finite=False),
        )

    @property
    def milliseconds(self) -> float:
        """How long it took, with what the user's code did before its pull."""
        return sum(self.phases.values())

    @property
    def ended_us(self) -> float:
        """When its push was acknowledged. Only for an iteration that has times."""
        assert self.at_us is not None
        return self.at_us + 1000 * self.milliseconds


class ShardVersion(NamedTuple):
    """A shard's part of one version, made by the shard's holder. Times as for `Iteration`.

    received, stored  bytes of contributions that it read, and of what it sent to Redis
    square_sum        the sum of squares of the shard's part of the reduced gradient; 0 if it was not measured
    progress          how many contributions all versions before this one have
    late, latest      the sum and the highest staleness of its contributions, in versions
    lr                the learning rate of parameters in no group; None in a trace of an earlier version of kvps
    """

    shard: int
    entry: str
    version: int
    contributions: int
    at_us: int
    phases: Phases
    received: int
    stored: int
    square_sum: float
    progress: int = 0
    late: int = 0
    latest: int = 0
    lr: float | None = None

    @classmethod
    def of(cls, shard: int, entry: Entry) -> ShardVersion:
        """Parse an entry of the shard's trace. Raises CorruptData."""
        id, fields = entry
        where = f"the trace of shard {shard}"
        f = Fields(fields, where)
        return cls(
            shard=shard,
            entry=id,
            version=f.whole("version"),
            contributions=f.whole("contributions"),
            at_us=f.whole("at", high=_LATEST_US),
            phases=_phases(f, SHARD_PHASES, where),
            received=f.whole("received"),
            stored=f.whole("stored"),
            square_sum=f.number("square_sum"),
            progress=f.whole("progress", default=0),
            late=f.whole("late", default=0),
            latest=f.whole("latest", default=0),
            lr=f.number("lr") if "lr" in fields else None,
        )

    @property
    def ended_us(self) -> float:
        """When it was committed."""
        return self.at_us + 1000 * sum(self.phases.values())


def mean(values: Sequence[float]) -> float:
    """Return the mean of losses. They may be infinite, or too large to be added up, where training has diverged."""
    return sum(value / len(values) for value in values)


class VersionFigures(NamedTuple):
    """What is known of one version as a whole: what its shards told, together. Names as of `ShardVersion`; `norm` is
    that of the reduced gradient."""

    version: int
    at_us: float
    contributions: int
    progress: int
    late: int
    latest: int
    lr: float | None
    received: float
    stored: float
    norm: float

    @classmethod
    def together(cls, parts: Sequence[ShardVersion]) -> VersionFigures:
        """Return the figures of a version by what all its shards told."""
        v, squares = parts[0], sum(part.square_sum for part in parts)
        return cls(
            version=v.version,
            at_us=max(part.ended_us for part in parts),
            contributions=v.contributions,
            progress=v.progress,
            late=v.late,
            latest=v.latest,
            lr=v.lr,
            received=sum(part.received for part in parts),
            stored=sum(part.stored for part in parts),
            norm=math.sqrt(max(0.0, squares)),
        )


class WholeVersions:
    """Puts together what the shards tell of each version."""

    def __init__(self, shards: int) -> None:
        self._shards = shards
        self._parts: dict[int, dict[int, ShardVersion]] = {}  # version -> shard -> its part

    def add(self, made: Iterable[ShardVersion]) -> Iterator[VersionFigures]:
        """Yield each version of which all shards have their part now. A shard's parts must come in the order of their
        versions; what an earlier version lacks then does not come any more."""
        for v in made:
            parts = self._parts.setdefault(v.version, {})
            parts[v.shard] = v
            if len(parts) == self._shards:
                yield VersionFigures.together(list(parts.values()))
                self._parts = {version: each for version, each in self._parts.items() if version > v.version}


class Span(NamedTuple):
    """One phase on a lane, from `start_us` to `end_us` of the server's clock. `version` is what a worker pulled, or
    what a shard made; `round` is 0 for a shard. `bytes` is what the phase moved."""

    lane: str
    phase: str
    start_us: float
    end_us: float
    version: int
    round: int
    bytes: int
    clock: int = 0
    unit: int | None = None


def _phases(f: Fields, names: Iterable[str], where: str) -> dict[str, float]:
    phases = {name: f.number(f"{name}_ms", default=0.0) for name in names}
    for name, milliseconds in phases.items():
        if not 0 <= milliseconds <= _LONGEST_MS:
            whole(milliseconds, f"{where}: {name}_ms", 0, int(_LONGEST_MS))  # raises with the value
    return phases


def spans(done: Iterable[Iteration | ShardVersion]) -> Iterator[Span]:
    """Yield the spans of one worker's iterations or of one shard's versions, oldest first: each phase that took time,
    one behind the other. An iteration without times has none.

    They never overlap. The estimate of the server's clock gets better from time to time, and the lane then moves a
    little: what would lie before the end of the last span is cut off.
    """
    last = 0.0
    for each in done:
        if each.at_us is None:
            continue
        if isinstance(each, Iteration):
            lane, moved = each.worker, {"fetch": each.pulled, "push": each.pushed}
            round_, clock, unit = each.round, each.clock, each.unit
        else:
            lane, moved = f"shard {each.shard}", {"fetch": each.received, "store": each.stored}
            round_, clock, unit = 0, 0, None
        start = float(each.at_us)
        for phase, milliseconds in each.phases.items():
            end = start + 1000 * milliseconds
            if end > max(start, last):
                yield Span(lane, phase, max(start, last), end, each.version, round_, moved.get(phase, 0), clock, unit)
                last = end
            start = end


# -- reading ----------------------------------------------------------------------------------------------------------


def losses_of(job: Job) -> list[tuple[int, float, float, float]]:
    """Return (version, mean, lowest, highest loss of the weights before it) of the whole run, thinned, by version.
    Raises CorruptData."""
    return [
        (version, parts[1] / max(1.0, parts[0]), parts[2], parts[3])
        for version, parts in _thinned(job, job.access.keys.losses, "losses", 4)
    ]


def versions_of(job: Job) -> list[VersionFigures]:
    """Return the figures of versions of the whole run, thinned, oldest first. Raises CorruptData."""
    return [
        VersionFigures(
            version=version,
            at_us=at_us,
            contributions=int(contributions),
            progress=int(progress),
            late=int(late),
            latest=int(latest),
            lr=lr,
            received=received * of_all,
            stored=stored * of_all,
            norm=math.sqrt(max(0.0, squares * of_all)),
        )
        for version, parts in _thinned(job, job.access.keys.versions, "figures", 10)
        for told, received, stored, squares, at_us, contributions, progress, late, latest, lr in [parts]
        # A version that was made again after a loss was told of again; of a new one, some shards may not have told yet.
        for of_all in [job.layout.shards / max(1.0, told)]
    ]


def _thinned(job: Job, key: str, what: str, values: int) -> list[tuple[int, list[float]]]:
    """Return the entries of a hash of the whole run, by version. Raises CorruptData."""
    found = []
    for version, text in job.access.client.call("HGETALL", key).items():
        if version != "every":  # a job that an earlier kvps made has that field
            where = f"the {what} of version {version[:20]!r}"
            parts = [number(part, where) for part in [*text[: 32 * values].split(), *["-"] * values][:values]]
            found.append((whole(version, f"a version with {what}"), parts))
    return sorted(found)


class LearnerLosses:
    """What a learner said of the versions that it published. Each call of `read` reads what is new in the log."""

    def __init__(self, job: Job, first: int) -> None:
        """The first reading has the newest `first` entries of the log."""
        self._job = job
        self._first = first
        self._seen = ""

    def read(self) -> list[tuple[int, float]]:
        """Return the new (version, loss), oldest first; none of a job that workers train. Raises CorruptData."""
        client, commits = self._job.access.client, self._job.access.keys.commits
        if not self._job.config.metadata.publishes:
            return []
        newest = [] if self._seen else client.call("XREVRANGE", commits, "+", "-", "COUNT", self._first)
        entries = list(entries_after(client, commits, self._seen)) if self._seen else newest[::-1]
        self._seen = entries[-1][0] if entries else self._seen
        made = [Commit.of(fields) for _, fields in entries if fields.get("kind") == "commit"]
        return [(commit.version, commit.plan.loss) for commit in made if commit.plan.loss is not None]


class Traces:
    """The traces of a job. Each call of `read` reads what is new since the one before."""

    def __init__(self, job: Job, first: int = 0) -> None:
        """The first reading has the newest `first` entries of each trace, or all that there are for 0."""
        self._job = job
        self._first = first
        self._seen: dict[str, str] = {}  # key -> the id of the last entry that was read

    def read(self, workers: Iterable[str]) -> tuple[dict[str, list[Iteration]], dict[int, list[ShardVersion]]]:
        """Return the new iterations of each worker and the new versions of each shard, oldest first. Raises
        CorruptData."""
        keys, names, shards = self._job.access.keys, list(workers), range(self._job.layout.shards)
        wanted = [*(keys.trace(name) for name in names), *(keys.shard_trace(shard) for shard in shards)]
        pages = [self._in_order(key, page) for key, page in zip(wanted, self._pages(wanted), strict=True)]
        iterations = {name: [Iteration.of(name, e) for e in page] for name, page in zip(names, pages, strict=False)}
        rest = pages[len(names) :]
        return iterations, {n: [ShardVersion.of(n, e) for e in page] for n, page in zip(shards, rest, strict=True)}

    def _pages(self, keys: list[str]) -> list[list[Entry]]:
        return self._job.access.client.together([self._command(key) for key in keys])

    def _command(self, key: str) -> tuple[object, ...]:
        if key in self._seen:
            return ("XRANGE", key, f"({self._seen[key]}", "+")
        newest = ("XREVRANGE", key, "+", "-")
        return (*newest, "COUNT", self._first) if self._first else newest

    def _in_order(self, key: str, page: list[Entry]) -> list[Entry]:
        """Return a page oldest first, and note its last entry."""
        entries = [(id, fields) for id, fields in (page if key in self._seen else reversed(page))]
        if entries:
            self._seen[key] = entries[-1][0]
        return entries
