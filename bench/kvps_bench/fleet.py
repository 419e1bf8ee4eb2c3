"""A job under fire: aggregators and learners as processes that are killed, started again, slowed down and stopped."""

from __future__ import annotations

import bisect
import os
import random
import secrets
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from kvps_workers.task import load_task

from kvps.cli.fault_injection import Verdict, judge, replayed
from kvps.cli.progress import aggregate
from kvps.cli.supervise import Child, Supervisor
from kvps.errors import KvpsError
from kvps.job import Job
from kvps.protocol.job_state import Commit
from kvps.store import Store
from kvps_bench.paced_learner import TASK, Orders, Pace, command

AGGREGATORS = 2  # one works, the other stands by
_AGGREGATOR_EVERY = 3  # kills of learners
_WATCH_S = 0.05
_PATIENCE_S = 120.0


class Made(NamedTuple):
    """A version: when it was committed, in ms on the server's clock, and of how many samples."""

    at_ms: int
    samples: int


class Progress(NamedTuple):
    """All versions of a job, oldest first."""

    versions: Sequence[Made]

    @classmethod
    def of(cls, job: Job) -> Progress:
        """Read it from the commit log. The samples of a contribution are its weight."""
        commits = [(entry, Commit.of(fields)) for entry, fields in job.entries() if fields.get("kind") == "commit"]
        return cls(
            [Made(int(e.partition("-")[0]), sum(c.weight for c in made.plan.contributions)) for e, made in commits]
        )

    def within(self, begin_ms: int, end_ms: int) -> Progress:
        """Return the versions from the last one before `begin_ms` to the first one at `end_ms` or later."""
        at = [version.at_ms for version in self.versions]
        return Progress(
            self.versions[max(0, bisect.bisect_left(at, begin_ms) - 1) : bisect.bisect_left(at, end_ms) + 1]
        )

    def intervals(self) -> list[float]:
        """Return the seconds between two versions."""
        return [(b.at_ms - a.at_ms) / 1000 for a, b in pairwise(self.versions)]

    @property
    def samples_per_s(self) -> float:
        return sum(version.samples for version in self.versions[1:]) / sum(self.intervals())

    @property
    def versions_per_s(self) -> float:
        return len(self.intervals()) / sum(self.intervals())


@dataclass(frozen=True)
class Fire:
    """What happens to a fleet: a random learner is killed every `kill_every_s` on average. With every third one, the
    aggregator that works is killed too."""

    kill_every_s: float
    seed: int


class End(NamedTuple):
    """What was found when a job had ended. `differs` says how the replay differs; "" if it does not."""

    verdict: Verdict
    differs: str
    accuracy: float


class Fleet:
    """The processes of one job, supervised as those of `kvps up`: who is killed is started again."""

    def __init__(self, store: Store, job: Job, pace: Pace, folder: Path) -> None:
        self.kills = 0
        self.aggregator_kills = 0
        self._store, self._job, self._record = store, job, folder / "record"
        self._orders = Orders(folder)
        self._supervisor = Supervisor(store, "kvps_bench", lambda: job, gives_up=False)
        self._record.mkdir()
        self._aggregators = aggregate(self._supervisor, job.name, AGGREGATORS, ["--record", str(self._record)])
        ranks = range(job.config.workers)
        self._learners = [self._supervisor.run(f"w{rank}", command(job.name, rank, pace, folder), {}) for rank in ranks]

    def watch_until(self, over: Callable[[], bool]) -> None:
        """Supervise until `over`. Raises KvpsError with what a process printed that failed, or after two minutes."""
        deadline = time.monotonic() + _PATIENCE_S
        while not over():
            self._supervisor.watch(_WATCH_S)
            if failed := [child for child in self._supervisor.children.values() if child.failed]:
                said = " ".join(line.text for line in self._supervisor.said())
                raise KvpsError(f"{failed[0].name} failed: {said}")
            if time.monotonic() > deadline:
                raise KvpsError(f"job {self._job.name} made no progress in {_PATIENCE_S:g} s")

    def watch(self, until: float) -> None:
        """Supervise until this time of `time.monotonic`."""
        self.watch_until(lambda: time.monotonic() >= until)

    def await_more(self, number: int) -> None:
        """Supervise until so many versions more are made."""
        wanted = self._job.state().version + number
        self.watch_until(lambda: self._job.state().version >= wanted)

    def train(self, seconds: float, fire: Fire | None = None) -> Progress:
        """Supervise for so long, under fire or not; return the versions of that time."""
        begin, until = self._now_ms(), time.monotonic() + seconds
        if fire:
            self._orders.be_slow()
            chance, kill_at = random.Random(fire.seed), time.monotonic()
            while (kill_at := kill_at + chance.uniform(0.5, 1.5) * fire.kill_every_s) < until:
                self.watch(kill_at)
                self._kill(chance)
        self.watch(until)
        end = self._now_ms()
        self.watch_until(lambda: Progress.of(self._job).versions[-1].at_ms >= end)
        return Progress.of(self._job).within(begin, end)

    def _kill(self, chance: random.Random) -> None:
        self.kills += 1
        victims = [chance.choice(self._learners)]
        if self.kills % _AGGREGATOR_EVERY == 0:
            holder = self._job.holders()[0]
            victims += [child for child in self._aggregators if holder.startswith(f"{child.mark}:")]
            self.aggregator_kills += len(victims) - 1
        for child in victims:
            child.killed_by = "kvps_bench"
            child.process.kill()

    @contextmanager
    def stopped(self, rank: int) -> Iterator[None]:
        """Stop a learner's process, as SIGSTOP does, for the time of the block."""
        learner = self._learners[rank].process
        os.kill(learner.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(learner.pid, signal.SIGCONT)

    def versions_in(self, seconds: float) -> int:
        """Supervise for so long; return how many versions were made."""
        before, until = self._job.state().version, time.monotonic() + seconds
        self.watch(until)
        return self._job.state().version - before

    def end(self) -> End:
        """Have all learners leave, and judge the finished job as `kvps up --kill-every` does."""
        self._orders.stop()
        processes: list[Child] = [*self._learners, *self._aggregators]
        self.watch_until(lambda: all(child.done for child in processes))
        acks = [self._orders.acks(rank) for rank in range(len(self._learners))]
        verdict = judge([file for file in acks if file.exists()], self._job)
        figures = load_task(TASK).evaluate(self._job.snapshot()[1], np)
        return End(verdict, replayed(self._store, self._job, None, self._record), figures["accuracy"])

    def close(self) -> None:
        """End all processes."""
        self._supervisor.end()

    def _now_ms(self) -> int:
        seconds, micros = self._store.client.call("TIME")
        return int(seconds) * 1000 + int(micros) // 1000


@contextmanager
def fleet(store: Store, pace: Pace, settings: Mapping[str, Any]) -> Iterator[Fleet]:
    """Yield the fleet of a new job with these settings, once it has made a version; remove the job after the block."""
    task = load_task(TASK)
    job = store.create_job(f"bench-{secrets.token_hex(4)}", task.parameters(0), **settings)
    try:
        with tempfile.TemporaryDirectory(prefix="kvps-fleet-") as folder:
            made = Fleet(store, job, pace, Path(folder))
            try:
                made.await_more(2)
                yield made
            finally:
                made.close()
    finally:
        store.remove_job(job.name)
