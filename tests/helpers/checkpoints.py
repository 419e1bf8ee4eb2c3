"""Jobs that are stopped in the middle, for tests that continue from a checkpoint."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from helpers.harness import aggregating, gradient
from helpers.waiting import eventually
from kvps_aggregator.checkpoints import Checkpoints

from kvps.job import Job

ROUNDS, STOP = 24, 9
PATIENT = {"worker_timeout_ms": 60_000}
Bits = dict[str, bytes]


def train_to(job: Job, rounds: int, workers: int = 2, checkpoints: Checkpoints | None = None) -> None:
    """Bring every worker to `rounds` rounds, and wait until they are committed."""
    together = threading.Barrier(workers)  # or the first might train alone: rounds do not wait for workers that left
    with aggregating(job, checkpoints=checkpoints), ThreadPoolExecutor(workers) as pool:
        for done in [pool.submit(_work, job, f"w{i}", rounds, together) for i in range(workers)]:
            done.result()
        assert eventually(lambda: all(m.pending == 0 for m in job.state().members.values()))


def _work(job: Job, worker: str, rounds: int, together: threading.Barrier) -> None:
    """Train to `rounds`; before the last round, a worker leaves as one that was stopped."""
    session = job.join(worker)
    together.wait(120)
    while session.round < rounds:
        session.push(gradient(session.pull(), session.rank, session.round))
    session.leave(finished=rounds == ROUNDS)


def bits(job: Job) -> Bits:
    return {name: array.tobytes() for name, array in job.snapshot()[1].items()}


def saved(job: Job, directory: Path) -> Path:
    made = job.checkpoint()
    made.write(directory / made.filename)
    return directory / made.filename
