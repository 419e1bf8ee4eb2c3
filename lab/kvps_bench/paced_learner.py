"""A learner whose local steps take a known time, as on a device of its own: a process that is killed and started again.

It computes real steps on the digits, and sleeps for the rest of each step's time. So what is measured is the protocol
and the recovery, not the number of cores.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from kvps_workers.local_steps import LocalSteps
from kvps_workers.rounds import Batches
from kvps_workers.task import load_task

from kvps.device.base import CPU
from kvps.errors import ContributionLate, WorkerEvicted
from kvps.job import Job
from kvps.session.round_timer import RoundTimer
from kvps.session.session import Session
from kvps.store import connect

TASK = "digits"


@dataclass(frozen=True)
class Pace:
    """How fast learners are.

    step_ms       what a local step takes
    slow          how many times as long a step of the slow learner takes
    slow_every_s  after how many seconds the next learner is the slow one
    """

    step_ms: float
    slow: float
    slow_every_s: float

    def step_s(self, rank: int, workers: int, slow_for_s: float) -> float:
        """Return the seconds that a step takes; `slow_for_s` is how long learners have been slow, negative if none
        is."""
        is_slow = slow_for_s >= 0 and int(slow_for_s / self.slow_every_s) % workers == rank
        return self.step_ms / 1000 * (self.slow if is_slow else 1)


class Orders:
    """What the bench tells learners, also those that start later: files of a folder."""

    def __init__(self, folder: Path) -> None:
        self._slow, self._stop, self._folder = folder / "slow", folder / "stop", folder

    def be_slow(self) -> None:
        """Have learners be slow in turns from now on."""
        written = self._slow.with_suffix(".new")
        written.write_text(f"{time.time()}")
        written.rename(self._slow)

    def slow_for_s(self) -> float:
        """Return how long learners have been slow in turns; -1 if they are not."""
        return time.time() - float(self._slow.read_text()) if self._slow.exists() else -1.0

    def stop(self) -> None:
        """Have learners leave after the round that they are in."""
        self._stop.touch()

    @property
    def stopped(self) -> bool:
        return self._stop.exists()

    def acks(self, rank: int) -> Path:
        """Return the file to which a learner appends its acknowledged contributions: see `fault_injection.judge`."""
        return self._folder / f"w{rank}.acks"


class PacedLearner:
    """A worker of a job of the digits, with local steps whose inner state begins anew with each process."""

    def __init__(self, job: Job, rank: int, pace: Pace, orders: Orders) -> None:
        self._job, self._rank, self._pace, self._orders = job, rank, pace, orders
        self._config = job.config
        task = load_task(TASK)
        self._batches = Batches(task, self._config, rank, np)
        self._steps = LocalSteps(task, self._config, job.layout, CPU)
        self._timer = RoundTimer(self._config) if self._config.timed_rounds else None

    def run(self) -> None:
        """Train until the bench says stop. A learner that was evicted joins again."""
        while not self._orders.stopped:
            try:
                with self._job.join(f"w{self._rank}") as session:
                    while not self._orders.stopped:
                        self._round(session)
            except WorkerEvicted:
                continue
            return
        self._job.join(f"w{self._rank}").leave()  # started again after the end, and counted as finished

    def _round(self, session: Session) -> None:
        params = session.pull()
        if self._timer:
            self._timer.begin(session.version_age_s)
        rows: list[int] = []
        batches = self._paced(self._first_step(session), rows)
        loss, gradient = self._steps.pseudo_gradient(params, batches, session.accepted)
        try:
            session.push(gradient, loss, sum(rows))
        except ContributionLate:
            return
        with self._orders.acks(self._rank).open("a") as file:  # one write a line: a kill cuts the last line at most
            file.write(f"{session.worker} {session.incarnation} {session.sequence}\n")

    def _first_step(self, session: Session) -> int:
        if self._timer:
            first = self._batches.after(session.weight_sum)
            assert first is not None, "the bench ends before the epochs do"
            return first
        return session.round * self._config.batches_per_round

    def _paced(self, first: int, rows: list[int]) -> Iterator[tuple[float, tuple[Any, ...]]]:
        """Yield the batches of a round with their numbers, each for its time; append how many samples each has."""
        at = time.monotonic()
        for number in count(first):
            at += self._pace.step_s(self._rank, self._config.workers, self._orders.slow_for_s())
            taken = self._batches[number]
            rows.append(len(taken))
            yield number, self._batches.samples(taken)
            time.sleep(max(0.0, at - time.monotonic()))
            if self._timer.over() if self._timer else len(rows) == self._config.batches_per_round:
                return


def command(job: str, rank: int, pace: Pace, folder: Path) -> list[str]:
    """Return the command of a learner's process, which finds the server in KVPS_REDIS_URL."""
    return [sys.executable, "-P", "-m", __name__, job, str(rank), json.dumps(asdict(pace)), str(folder)]


def main() -> None:
    job, rank, pace, folder = sys.argv[1:]
    with connect(os.environ["KVPS_REDIS_URL"]) as store:
        PacedLearner(store.job(job), int(rank), Pace(**json.loads(pace)), Orders(Path(folder))).run()


if __name__ == "__main__":
    main()
