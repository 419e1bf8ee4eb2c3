"""Rounds of a real job whose phases do not overlap, so that the processor time of each can be told.

All workers push at once, then the aggregator works, then all workers pull at once: each in a process of its own. They
fight for caches and memory as in any round: bytes cost less when one process acts alone.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from kvps_aggregator.aggregator import Aggregator

from kvps.arrays.layout import CHUNK_BYTES, DTYPE
from kvps.job import Job
from kvps_bench.crew import Member, Place, crew, together
from kvps_bench.roles import Role, model, temporary_job

LARGE, QUICK_BYTES = 40 * CHUNK_BYTES, 4 * CHUNK_BYTES
PATIENT = {"worker_timeout_ms": 3_600_000, "lease_ms": 3_600_000}
"""Nobody is evicted only because others have their turn."""
_WORKERS = 2  # of the reference


class Phase(NamedTuple):
    """Processor seconds of one phase: of the server, and of one other process."""

    server: float
    client: float


class Round(NamedTuple):
    """A push of one worker, all of an aggregator's work on a version, and a pull of one worker."""

    push: Phase
    work: Phase
    pull: Phase

    def over(self, speed: float) -> Round:
        """Return what the round costs where all processor time is `speed` times as long."""
        return Round(*(Phase(phase.server * speed, phase.client * speed) for phase in self))


class Worker(Role):
    """A worker, whose calls return the processor seconds that they took."""

    def __init__(self, url: str, name: str, rank: int) -> None:
        super().__init__(url)
        job = self.store.job(name)
        self._session = job.join(f"w{rank}")
        self._gradient = gradient(job, rank)

    def push(self) -> float:
        """Push a gradient."""
        return _process_s(lambda: self._session.push(self._gradient))

    def pull(self) -> float:
        """Pull the newest version."""
        return _process_s(self._session.pull)

    def close(self) -> None:
        self._session.leave(finished=False)
        super().close()


class Maker(Role):
    """An aggregator, which works when it is told to."""

    def __init__(self, url: str, name: str) -> None:
        super().__init__(url)
        self._aggregator = Aggregator(self.store.job(name), threading.Event())
        self._aggregator.hold(at_once=True)

    def work(self) -> float:
        """Make the next version; return the processor seconds that it took."""
        return _process_s(self._aggregator.work)

    def close(self) -> None:
        self._aggregator.release()
        super().close()


@contextmanager
def phased(
    where: Place, over: str, workers: int, nbytes: int = LARGE, **settings: Any
) -> Iterator[Callable[[], Round]]:
    """Yield what does one round of a job of so many bytes, and returns what it took. The first ones, which get their
    memory from the kernel, are done."""
    url = where.urls[over]
    with temporary_job(where, over, model(nbytes), workers=workers, **PATIENT | settings) as job:
        makers = [(Worker, url, job.name, rank) for rank in range(workers)]
        with crew((Maker, url, job.name), *makers) as (maker, *members):

            def turn() -> Round:
                pull = _phase(job, members, "pull")
                push = _phase(job, members, "push")
                return Round(push, _phase(job, [maker], "work"), pull)

            for _ in range(2):
                turn()
            yield turn


class Reference:
    """How fast this machine is now: the processor time of a round of 2 workers in fp32.

    On a shared machine the same work may take half as long again a minute later. So what is compared with what was
    measured at another time is measured beside this.
    """

    def __init__(self, turn: Callable[[], Round]) -> None:
        self._turn = turn

    def seconds(self, rounds: int = 1) -> float:
        """Return the processor seconds of a round, of all processes together: the median of some."""
        return statistics.median(self._once() for _ in range(rounds))

    def _once(self) -> float:
        push, work, pull = self._turn()
        return _WORKERS * (sum(push) + sum(pull)) + sum(work)


@contextmanager
def reference(where: Place, over: str, nbytes: int = LARGE) -> Iterator[Reference]:
    """Yield the reference on a server."""
    with phased(where, over, _WORKERS, nbytes) as turn:
        yield Reference(turn)


def server_s(job: Job) -> float:
    """Return the processor seconds of the server so far."""
    cpu = job.access.client.call("INFO", "cpu")
    return float(cpu["used_cpu_user"]) + float(cpu["used_cpu_sys"])


def gradient(job: Job, seed: int = 0) -> dict[str, Any]:
    """Return a gradient of normally distributed numbers."""
    random = np.random.default_rng(seed)
    return {p.name: random.standard_normal(p.shape, DTYPE) for p in job.layout.parameters}


def _phase(job: Job, members: list[Member], method: str) -> Phase:
    """Have all members do a phase at once; return what each takes."""
    before = server_s(job)
    spent = together(members, method)
    return Phase((server_s(job) - before) / len(members), statistics.mean(spent))


def _process_s(act: Callable[[], object]) -> float:
    """Return the processor seconds of this process that an act takes."""
    before = time.process_time()
    act()
    return time.process_time() - before
