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
from pathlib import Path
from typing import Any

import numpy as np
from kvps_workers.local_steps import LocalSteps
from kvps_workers.rounds import Batches
from kvps_workers.task import load_task

from kvps.device.base import CPU
from kvps.errors import ContributionLate, WorkerEvicted
from kvps.job import Job
from kvps.session.session import Session
from kvps.store import connect

TASK = "digits"


@dataclass(frozen=True)
class Pace:
    """How fast learners are.

    step_ms       what a local step takes
    timed         whether a round ends `local_steps` times `step_ms` after its version was made, with the steps that the
                  learner has had time for, one at least; else it ends after `local_steps` steps
    slow          how many times as long a step of the slow learner takes
    slow_every_s  after how many seconds the next learner is the slow one
    """

    step_ms: float
    timed: bool
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
        rows: list[int] = []
        batches = self._paced(self._first_step(session), self._ends_at(), rows)
        loss, gradient = self._steps.pseudo_gradient(params, batches, session.sequence)
        try:
            session.push(gradient, loss, sum(rows))
        except ContributionLate:
            return
        with self._orders.acks(self._rank).open("a") as file:  # one write a line: a kill cuts the last line at most
            file.write(f"{session.worker} {session.incarnation} {session.sequence}\n")

    def _first_step(self, session: Session) -> int:
        return session.round * self._config.local_steps

    def _ends_at(self) -> float:
        """Return the time, in seconds of `time.monotonic`, at which a timed round ends."""
        reply = self._job.client.call("XREVRANGE", self._job.keys.commits, "+", "-", "COUNT", 1)
        ago = 0.0
        if self._pace.timed and reply and reply[0][1].get("kind") == "commit":
            ago = time.time() - int(reply[0][0].partition("-")[0]) / 1000
        return time.monotonic() - max(0.0, ago) + self._config.local_steps * self._pace.step_ms / 1000

    def _paced(self, first: int, ends_at: float, rows: list[int]) -> Iterator[tuple[float, tuple[Any, ...]]]:
        """Yield the batches of a round with their numbers, each for its time; append how many samples each has."""
        at = time.monotonic()
        for number in range(first, first + self._config.local_steps):
            at += self._pace.step_s(self._rank, self._config.workers, self._orders.slow_for_s())
            if self._pace.timed and rows and at > ends_at + self._pace.step_ms / 2000:
                return
            taken = self._batches[number]
            rows.append(len(taken))
            yield number, self._batches.samples(taken)
            time.sleep(max(0.0, at - time.monotonic()))


def command(job: str, rank: int, pace: Pace, folder: Path) -> list[str]:
    """Return the command of a learner's process, which finds the server in KVPS_REDIS_URL."""
    return [sys.executable, "-P", "-m", __name__, job, str(rank), json.dumps(asdict(pace)), str(folder)]


def main() -> None:
    job, rank, pace, folder = sys.argv[1:]
    with connect(os.environ["KVPS_REDIS_URL"]) as store:
        PacedLearner(store.job(job), int(rank), Pace(**json.loads(pace)), Orders(Path(folder))).run()


if __name__ == "__main__":
    main()
