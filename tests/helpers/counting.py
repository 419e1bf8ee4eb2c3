"""A job whose weights count how often each sample was trained on, and data sets of numbers for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from helpers.harness import check_chain
from torch import nn
from torch.utils.data import Dataset, IterableDataset

import kvps
import kvps.torch
from kvps.store import Store

SAMPLES, BATCH, EPOCHS = 45, 8, 2  # six batches an epoch, the last of 5 samples
UNITS = 6 * EPOCHS


class Numbers(Dataset[int]):
    """Samples that are their own numbers."""

    def __init__(self, samples: int = SAMPLES) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, number: int) -> int:
        return number


class Sharded(IterableDataset[Any]):
    """The samples of a data set in shards, which can seek. `sought` are the shards and offsets it was asked for."""

    def __init__(self, samples: Any, samples_per_shard: Sequence[int] = (20, 0, 7, 18)) -> None:
        self.samples_per_shard, self._samples = samples_per_shard, samples
        self.sought = list[tuple[int, int]]()

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("it is asked for parts of its shards")

    def iterate(self, shard: int, offset: int) -> Iterator[Any]:
        self.sought.append((shard, offset))
        first = sum(self.samples_per_shard[:shard])
        return (self._samples[n] for n in range(first + offset, first + self.samples_per_shard[shard]))


class Count(nn.Module):
    """Its weights count how often it was trained on each sample, with SGD(lr=1) of the sum of the gradients."""

    def __init__(self, samples: int = SAMPLES) -> None:
        super().__init__()
        self.done = nn.Parameter(torch.zeros(samples))

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return -self.done[numbers].sum()


def create(store: Store, model: nn.Module, name: str = "job", **settings: Any) -> kvps.Job:
    data = {"samples": SAMPLES, "batch_size": BATCH, "epochs": EPOCHS, "units_per_round": 4}
    settings = data | {"optimizer": kvps.SGD(lr=0.1), "worker_timeout_ms": 60_000, "transport": "redis"} | settings
    return store.create_job(name, kvps.torch.parameters(model), **settings)


def counting(store: Store, samples: int = SAMPLES, **settings: Any) -> kvps.Job:
    settings = {"optimizer": kvps.SGD(lr=1.0), "reduction": "sum", "samples": samples} | settings
    return create(store, Count(samples), **settings)


def once(job: kvps.Job, units: int = UNITS) -> None:
    """Assert that each unit is in exactly one commit, by the log, and each sample in every epoch, by the weights."""
    used = Counter(c.unit for commit in job.log() for c in commit.plan.contributions)
    assert used == dict.fromkeys(range(units), 1)
    np.testing.assert_array_equal(job.snapshot()[1]["done"], job.config.epochs)
    check_chain(job)


def count(
    job: kvps.Job, name: str, seen: list[Any], wait: Callable[[], object] = bool, dataset: Any = None, **how: Any
) -> None:
    """Train to the end; note the batches in `seen`, and `wait` before each."""
    dataset = dataset or Numbers(job.config.samples)
    model = Count(job.config.samples)
    with kvps.torch.join(job, model, name) as worker:
        for numbers in worker.batches(dataset, seed=False, **how):
            wait()
            model(numbers).backward()
            worker.step()
            seen.append(numbers)
