"""Records how long a shard's holder takes for the phases of each version, and writes that to the shard's trace.

A version is made chunk by chunk: one chunk is fetched, reduced and stepped before the next. So its phases take turns,
and their times are added up. If several threads make chunks, the sums are scaled to the time that passed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from typing import NamedTuple

from kvps.arrays.formats import format_of
from kvps.arrays.layout import Array
from kvps.connection.server_clock import ServerClock
from kvps.errors import KvpsError
from kvps.job import Job
from kvps.protocol.answers import ServerRestarted
from kvps.protocol.phases import SHARD_PHASES
from kvps.protocol.plan import Plan

WRITE_EVERY_S = 0.1
"""Seconds between two writes of what was recorded, so that small rounds do not pay for one each."""
_CLOCK_EVERY_S = 1.0


class _Times(NamedTuple):
    """Seconds that one chunk took, and the sum of squares of its reduced gradient."""

    fetch: float
    reduce: float
    step: float
    squares: float


class ChunkTimer:
    """The timer of one chunk, from when it is made. On one thread."""

    def __init__(self, into: list[_Times]) -> None:
        self._into = into
        self._fetch = self._squares = 0.0
        self._reduced_at: float | None = None
        self._began = time.perf_counter()

    def fetching(self, parts: Iterator[Array]) -> Iterator[Array]:
        """Yield the parts, and note how long each was waited for."""
        while True:
            asked = time.perf_counter()
            part = next(parts, None)
            self._fetch += time.perf_counter() - asked
            if part is None:
                return
            yield part

    def reduced(self, square_sum: float) -> None:
        """Note that the reduction ends now, with a gradient of this sum of squares."""
        self._squares = square_sum
        self._reduced_at = time.perf_counter()

    def end(self) -> None:
        """Note that the chunk is made."""
        now = time.perf_counter()
        reduced = now if self._reduced_at is None else self._reduced_at
        self._into.append(_Times(self._fetch, reduced - self._began - self._fetch, now - reduced, self._squares))


class VersionSpans:
    """The times of one shard's versions. `entries` are those that are not written yet, see `JobScripts.trace`."""

    def __init__(self, job: Job, number: int, clock: ServerClock) -> None:
        self.entries: list[str] = []
        self._config = job.config
        self._clock = clock
        self._began = self._made = self._measured = self._waited = 0.0
        self._times: list[_Times] = []
        self._stored = 0
        format_, chunks = format_of(job.config.gradient_format), job.layout.chunks[number]
        self._part_bytes = cache(lambda part: sum(format_.nbytes(c.stop - c.start) for c in chunks if c.in_part(part)))

    def begin(self) -> None:
        """Note that work on a version begins now."""
        self._times, self._stored, self._waited, self._began = [], 0, 0.0, time.perf_counter()

    def chunk(self) -> ChunkTimer:
        """Return the timer of a chunk that is being made. Any thread may ask."""
        return ChunkTimer(self._times)

    def measured(self) -> None:
        """Note that the gradient is measured. Other aggregators may have to measure their shards before it goes on."""
        self._measured = time.perf_counter()

    def resume(self) -> None:
        """Note that the version is made now of the measured gradient. Waiting for others counts as fetching."""
        self._waited = time.perf_counter() - self._measured

    def made(self, stored: int) -> None:
        """Note that the version is made, and that so many bytes of it are sent to Redis."""
        self._made, self._stored = time.perf_counter(), stored

    def committed(self, plan: Plan) -> None:
        """Note that `ready` was called for the plan's version."""
        began_us = self._clock.micros(self._began)
        if began_us is None:
            return
        phases = self._phases() | {"commit": time.perf_counter() - self._made}
        squares = sum([times.squares for times in self._times])
        received = sum([self._part_bytes(c.part) for c in plan.counting])
        late = [max(0, plan.version - 1 - c.base) for c in plan.contributions]
        took = " ".join([f"{phase}_ms {1000 * phases[phase]:.3f}" for phase in SHARD_PHASES])
        self.entries.append(
            f"version {plan.version} at {began_us} contributions {len(plan.contributions)} received {received} "
            f"stored {self._stored} square_sum {squares if math.isfinite(squares) else 0.0:.6g} "
            f"progress {plan.progress} late {sum(late)} latest {max(late, default=0)} lr {self._lr_of(plan):.9g} {took}"
        )

    def _lr_of(self, plan: Plan) -> float:
        """Return the learning rate of a plan's version, of parameters in no group."""
        optimizer, progress = self._config.optimizer, self._config.progress(plan.version - 1, plan.progress)
        return optimizer.lr_of(optimizer, progress, plan.lr)

    def _phases(self) -> dict[str, float]:
        """Return the seconds of each phase until the version was made. Together they are the time that passed."""
        passed = self._made - self._began
        fetch, reduce, step, _ = map(sum, zip(*self._times, strict=True)) if self._times else (0.0,) * 4
        scale = min(1.0, (passed - self._waited) / max(fetch + reduce + step, 1e-9))
        busy = {"fetch": scale * fetch + self._waited, "reduce": scale * reduce, "step": scale * step}
        return busy | {"store": max(0.0, passed - sum(busy.values()))}


class ShardTraces:
    """The traces of the shards that one aggregator holds. Used by its loop alone."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._clock = ServerClock(job.access.server.seconds)
        self._spans: dict[int, VersionSpans] = {}
        self._next_write = self._next_sample = 0.0

    def of(self, number: int) -> VersionSpans:
        """Return the times of a shard that is held from now on."""
        self._sample()
        return self._spans.setdefault(number, VersionSpans(self._job, number, self._clock))

    @property
    def waiting(self) -> bool:
        """Whether there is something to write."""
        return any(spans.entries for spans in self._spans.values())

    def write(self, at_once: bool = False) -> None:
        """Write what was recorded, a few times a second. What a full or lost server does not take is dropped."""
        if time.perf_counter() < self._next_write and not at_once:
            return
        self._next_write = time.perf_counter() + WRITE_EVERY_S
        for number, spans in self._spans.items():
            entries, spans.entries = spans.entries, []
            if entries:
                with suppress(KvpsError, ServerRestarted):  # the loop's next call raises it too
                    self._job.access.scripts.trace(number, entries)
                    self._sample()

    def _sample(self) -> None:
        if time.perf_counter() > self._next_sample:
            self._next_sample = time.perf_counter() + _CLOCK_EVERY_S
            with suppress(KvpsError):
                self._clock.sample()
