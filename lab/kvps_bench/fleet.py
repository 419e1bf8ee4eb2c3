"""A job under fire: aggregators and learners as processes that are killed, started again, slowed down and stopped."""

from __future__ import annotations

import math
import os
import secrets
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from kvps_cli.prove.fault_injection import Verdict, judge, replayed
from kvps_cli.supervise import Child, Supervisor
from kvps_cli.train.progress import aggregate
from kvps_workers.task import load_task

from kvps.errors import KvpsError
from kvps.job import Job
from kvps.store import Store
from kvps_bench.paced_learner import TASK, Orders, Pace, command
from kvps_bench.progress import Fire, Progress, Window

AGGREGATORS = 2  # one works, the other stands by
_AGGREGATOR_EVERY = 3  # kills of learners
_WATCH_S = 0.05
_PATIENCE_S = 120.0


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

    def watch_until(self, over: Callable[[], bool], patience_s: float = _PATIENCE_S) -> None:
        """Supervise until `over`. Raises KvpsError with what a process printed that failed, or if it takes longer than
        `patience_s`."""
        deadline = time.monotonic() + patience_s
        while not over():
            self._supervisor.watch(_WATCH_S)
            if failed := [child for child in self._supervisor.children.values() if child.failed]:
                printed = " ".join(line.text for line in self._supervisor.new_lines())
                raise KvpsError(f"{failed[0].name} failed: {printed}")
            if time.monotonic() > deadline:
                raise KvpsError(f"job {self._job.name} made no progress in {patience_s:g} s")

    def _watch(self, until: float) -> None:
        """Supervise until this time of `time.monotonic`."""
        self.watch_until(lambda: time.monotonic() >= until, math.inf)

    def await_more(self, number: int) -> None:
        """Supervise until so many versions more are made."""
        wanted = self._job.state().version + number
        self.watch_until(lambda: self._job.state().version >= wanted)

    def train(self, seconds: float, fire: Fire | None = None) -> Window:
        """Supervise for so long, under fire or not."""
        begin, until = self._now_ms(), time.monotonic() + seconds
        if fire:
            self._orders.be_slow()
            for at in fire.kills(until):
                self._watch(at)
                self._kill(fire.choose(self._learners))
        self._watch(until)
        return Window(begin, self._now_ms())

    def progress(self, window: Window) -> Progress:
        """Return the versions of a window, once there is one after it."""
        self.watch_until(lambda: Progress.of(self._job).versions[-1].at_ms >= window.end_ms)
        return Progress.of(self._job).within(*window)

    def made_in(self, window: Window) -> int:
        """Return how many versions were made in a window that is over."""
        return sum(window.begin_ms <= made.at_ms < window.end_ms for made in Progress.of(self._job).versions)

    def _kill(self, learner: Child) -> None:
        self.kills += 1
        victims = [learner]
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
