"""Workers of the digits that train, come and go, and are slow."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from helpers.digits_job import training
from kvps_workers import load_task
from kvps_workers.contributions import Contributions

from kvps.errors import JobNotFound, WorkerEvicted
from kvps.job import Job
from kvps.session.session import Session
from same_bits.job import EPOCHS, PER_EPOCH, Kind, Pace, digits, expected_digits


def at_once() -> float:
    """Take no time."""
    return 0.0


def slow_at_times(rng: random.Random, chance: float = 0.1, seconds: float = 0.06) -> Pace:
    """Return the pace of a worker that is slow in some units."""
    return lambda: seconds if rng.random() < chance else 0.0


class Member:
    """A worker that trains the job to its end, and may leave and come back meanwhile."""

    def __init__(self, job: Job, name: str, pace: Pace = at_once, leaves: random.Random | None = None) -> None:
        self._job, self._name, self._pace, self._leaves = job, name, pace, leaves
        self._contributions = Contributions(job.config, job.layout, load_task("digits"), 0)
        self.duplicates = 0

    def __call__(self) -> None:
        """Train until all units are committed, or the job is removed."""
        while True:
            if self._leaves:
                time.sleep(self._leaves.uniform(0, 0.05))
            try:
                with self._job.join(self._name) as session:
                    done = self._train(session, self._leaves.randint(0, 12) if self._leaves else None)
                    self.duplicates += session.duplicates
                    session.leave(finished=done)
                    if done:
                        return
            except WorkerEvicted:
                continue
            except JobNotFound:
                return

    def _train(self, session: Session, units: int | None) -> bool:
        """Do so many units, or all; return whether all are committed. The worker may leave with a unit in its hands."""
        while (unit := session.next_unit()) is not None:
            if units == 0:
                return False
            params = session.pull()
            time.sleep(self._pace())
            session.push(self._contributions.compute(params, unit).grads)
            units = None if units is None else units - 1
        return True


def members(job: Job, count: int, rng: random.Random, slow: bool = False, leaves: bool = False) -> list[Member]:
    """Return so many workers w0, w1, ..., each with random numbers of its own."""
    return [
        Member(
            job,
            f"w{number}",
            slow_at_times(random.Random(rng.random())) if slow else at_once,
            random.Random(rng.random()) if leaves else None,
        )
        for number in range(count)
    ]


def threads(
    job: Job, count: int, rng: random.Random, slow: bool = False, leaves: bool = False
) -> list[Callable[[], None]]:
    """Return the task's own workers, or those that come and go, or are slow in some units."""
    if slow or leaves:
        return [*members(job, count, rng, slow, leaves)]
    return training(job, *(f"w{number}" for number in range(count)))


def copy(job: Job, name: str, pace: Pace, rng: random.Random) -> None:
    """Train the job as a script does."""
    Member(job, name, pace)()


_SETTINGS = {"units": EPOCHS * PER_EPOCH, "units_per_epoch": PER_EPOCH}
DIGITS = Kind("digits", digits, _SETTINGS, expected_digits, threads, copy, "digits")
