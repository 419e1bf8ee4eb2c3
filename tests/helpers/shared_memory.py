"""Shared memory, as tests look at it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from helpers.harness import gradient, log_entries
from helpers.internals import segments_of
from helpers.waiting import eventually
from kvps_aggregator import Aggregator, Outcome

from kvps.job import Job
from kvps.session.session import Session
from kvps.transport import shared_memory

OVER_SHM: dict[str, Any] = {"worker_timeout_ms": 60_000, "transport": "shm"}
LARGE = {"x": np.zeros(600_000, np.float32)}


def segments_folder(url: str) -> Path:
    return shared_memory.folder_of(url)


def segment_names(job: Job, kind: str = "") -> list[str]:
    assert segments_of(job)
    return [name for name in segments_of(job).names() if name.startswith(kind)]


def committed(job: Job, version: int) -> bool:
    return eventually(lambda: job.state().version == version)


def bits(job: Job) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in job.snapshot()[1].items()}


def recoveries(job: Job) -> list[tuple[str, str]]:
    """For each loss of memory in the log: the version that the job went on from, and how many versions were lost."""
    return [(fields["version"], fields["lost"]) for _, fields in log_entries(job) if fields["kind"] == "recover"]


def take(aggregator: Aggregator) -> None:
    """Have it hold the job's shards, as soon as nobody else does."""
    assert eventually(lambda: aggregator.hold(at_once=True) or bool(aggregator.held.shards))


def train(session: Session, aggregator: Aggregator, rounds: int) -> None:
    """Push some rounds as the only worker; each is committed before the next begins."""
    for _ in range(rounds):
        session.push(gradient(session.pull(), session.rank, session.round))
        assert aggregator.work() is Outcome.COMMITTED


def commit_all(aggregator: Aggregator) -> None:
    """Commit until nothing waits that can be committed."""
    while aggregator.work() is Outcome.COMMITTED:
        pass
