"""A CNN with dropout on images with noise, through `worker.batches`; its oracle is a loop in plain PyTorch."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from helpers.noisy_digits import NoisyDigits, cnn
from torch import nn
from torch.utils.data import default_collate

import kvps.torch
from kvps.job import Job
from kvps.session.batches import seed_numpy
from same_bits.job import SAMPLES, SEED, Kind, Momentum, Pace, Params, rounds, sha256_of
from same_bits.workers import at_once, slow_at_times

_LOADERS = (0, 2)  # processes of a worker's DataLoader
_OF_UNIT, _OF_LOADING = 3, 4  # which random numbers, see kvps.partitions


def parameters() -> Params:
    """Return the first weights."""
    return kvps.torch.parameters(cnn())


@cache
def expected() -> str:
    """Return the sha256 of the weights that one loop in PyTorch makes."""
    torch.set_num_threads(1)
    model, data = cnn(), NoisyDigits()
    w = {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}  # the model's own memory
    momentum = Momentum(w)
    for units in rounds():
        gradients = []
        for unit, rows in units:
            _seed(_OF_LOADING, unit)
            x, y = default_collate([data[row] for row in rows])
            _seed(_OF_UNIT, unit)
            model.zero_grad()
            _loss(model, x, y).backward()
            gradients.append({name: p.grad.numpy().copy() for name, p in model.named_parameters()})
        momentum.step(gradients)
    return sha256_of(w)


def _seed(of: int, unit: int) -> None:
    """Begin all random numbers anew, as `batches` does for a unit."""
    seed = int(np.random.SeedSequence((of, SEED, unit)).generate_state(1, np.uint64)[0] >> np.uint64(1))
    seed_numpy(seed)
    torch.manual_seed(seed)


def _loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(x), y)


# -- its workers ----------------------------------------------------------------------------------------------------


def copy(job: Job, name: str, pace: Pace, rng: random.Random) -> None:
    """Train the job as a script does."""
    torch.set_num_threads(1)
    model = cnn()
    with kvps.torch.join(job, model, name) as worker:
        for x, y in worker.batches(NoisyDigits(), num_workers=rng.choice(_LOADERS)):
            time.sleep(pace())
            loss = _loss(model, x, y)
            loss.backward()
            worker.step(loss)


class _Worker:
    """One of several workers in one thread. It computes the gradient of a unit, and pushes it later or leaves."""

    def __init__(self, job: Job, name: str, loaders: int) -> None:
        self._job, self._name, self._loaders = job, name, loaders
        self._model = cnn()
        self._session: Any = None
        self._batches: Any = None

    def compute(self) -> None:
        if self._session is None:
            self._session = kvps.torch.join(self._job, self._model, self._name)
            self._batches = iter(self._session.batches(NoisyDigits(), num_workers=self._loaders))
        x, y = next(self._batches)
        _loss(self._model, x, y).backward()

    def push(self) -> None:
        self._session.step()

    def leave(self, finished: bool = False) -> None:
        """Leave, with a unit that another worker gets, or `finished`."""
        if self._session is not None:
            if finished:
                assert next(self._batches, None) is None
            self._batches.close()
            self._session.leave(finished)
        self._session = None


def threads(
    job: Job, count: int, rng: random.Random, slow: bool = False, leaves: bool = False
) -> list[Callable[[], None]]:
    """Return what one thread runs: all workers in turns, because threads share the random numbers of PyTorch.

    Several compute a unit each, as long as the round has some, and then push in another order.
    """
    workers = [_Worker(job, f"w{number}", rng.choice(_LOADERS)) for number in range(count)]
    pace = slow_at_times(rng) if slow else at_once

    def take_turns() -> None:
        torch.set_num_threads(1)
        made, of_job = job.state().version, job.config.unit_rounds
        assert of_job
        for round_ in range(made, of_job.rounds):
            left = len(of_job.units_of(round_))
            while left:
                busy = rng.sample(workers, min(left, rng.randint(1, count)))
                for worker in busy:
                    worker.compute()
                    time.sleep(pace())
                for worker in rng.sample(busy, len(busy)):
                    if leaves and rng.random() < 0.1:
                        worker.leave()
                    else:
                        worker.push()
                        left -= 1
        for worker in workers:
            worker.leave(finished=True)

    return [take_turns]


CNN = Kind("CNN with dropout", parameters, {"samples": SAMPLES}, expected, threads, copy)
