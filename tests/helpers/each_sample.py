"""A task whose weights at the end say how often each sample was counted, and the reduction that adds them up."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np

import kvps
from kvps.job import Job
from kvps.store import Store

SAMPLES, BATCH, EPOCHS = 200, 3, 3
ADDS = """
def added(contributions, weights, out, xp):
    xp.copyto(out, contributions[0])
    for other in contributions[1:]:
        xp.add(out, other, out=out)
"""
"""A reduction, as the module `adds` of the user's directory."""


class Each:
    """A task with a parameter for each sample: a batch's gradient is 1 for those in it. With plain SGD inside, and
    contributions that are added up, each weight at the end is how often its sample was counted, below 0."""

    batch_size, epochs, lr = BATCH, EPOCHS, 1.0

    def __init__(self, step_s: float = 0.002) -> None:
        self._step_s = step_s

    def parameters(self, seed: int) -> dict[str, np.ndarray]:
        return {"x": np.zeros(SAMPLES, np.float32)}

    def data(self, rank: int, workers: int, xp: ModuleType) -> Any:
        return (np.arange(SAMPLES)[rank::workers],)

    def gradient(self, params: Mapping[str, Any], batch: Any, xp: ModuleType) -> Any:
        time.sleep(self._step_s)  # what a step takes
        grad = np.zeros(SAMPLES, np.float32)
        grad[batch[0]] = 1
        return float(len(batch[0])), {"x": grad}

    def evaluate(self, params: Mapping[str, Any], xp: ModuleType) -> Any:
        return {"loss": 0.0}


def each_job(store: Store, **settings: Any) -> Job:
    """Create a job of the task whose rounds end by the clock."""
    chosen = {"workers": 3, "task": "each", "batch_size": BATCH, "epochs": EPOCHS, "local_steps": "auto"}
    chosen |= {"round_ms": 20, "reduction": "adds:added", "optimizer": kvps.SGD(lr=1.0)}
    chosen |= {"inner_optimizer": kvps.SGD(lr=1.0), "worker_timeout_ms": 60_000}
    return store.create_job("job", Each().parameters(0), **chosen | settings)


def assert_a_quorum_had_all_its_samples(job: Job) -> None:
    """And no sample counts more than once an epoch, whatever a straggler could not do."""
    members, counts = job.state().members.values(), -job.snapshot()[1]["x"]
    assert job.state().finished(job.config)
    assert counts.max() <= EPOCHS
    assert counts.sum() == sum(m.weight_sum for m in members)
    share = {m.worker: EPOCHS * len(range(m.rank, SAMPLES, job.config.workers)) for m in members}
    assert sum(m.weight_sum == share[m.worker] for m in members) >= job.config.quorum


def assert_each_sample_counts_once_an_epoch(job: Job) -> None:
    assert job.state().finished(job.config)
    np.testing.assert_array_equal(job.snapshot()[1]["x"], np.full(SAMPLES, -EPOCHS, np.float32))
