"""The jobs that are trained in many ways: what they share, the digits with an oracle in plain NumPy, and the judge."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple, Protocol

import numpy as np
from kvps_workers import load_task

import kvps
from kvps.job import Job
from kvps.store import Store

SEED, LR, MOMENTUM = 0, 0.5, 0.5
SAMPLES, BATCH, EPOCHS, PER_ROUND = 1438, 96, 4, 6  # the last unit of an epoch and its last round are short
PER_EPOCH = 15
VERSIONS = EPOCHS * 3
TIMEOUTS = {"lease_ms": 300, "worker_timeout_ms": 5000}
Params = dict[str, np.ndarray]
Pace = Callable[[], float]
"""Returns the seconds that a unit takes beside its computing."""


class Threads(Protocol):
    """Returns what threads run to train a job with `count` workers, which may be slow in some units, and may leave and
    come back."""

    def __call__(
        self, job: Job, count: int, rng: random.Random, slow: bool = False, leaves: bool = False
    ) -> list[Callable[[], None]]: ...


class Kind(NamedTuple):
    """One of the jobs.

    parameters  returns the first weights
    settings    how its units are made
    expected    returns the sha256 of the weights that an oracle makes, without kvps
    threads     its workers on threads
    copy        trains the job to its end in one copy of a script, as the worker of that name
    task        what kvps worker trains, if it can
    """

    name: str
    parameters: Callable[[], Params]
    settings: Mapping[str, Any]
    expected: Callable[[], str]
    threads: Threads
    copy: Callable[[Job, str, Pace, random.Random], None]
    task: str = ""

    def settings_of(self, **more: Any) -> dict[str, Any]:
        """Return the settings of the job, with `more` that say where and how it is trained."""
        settings = {"seed": SEED, "batch_size": BATCH, "epochs": EPOCHS, "units_per_round": PER_ROUND, **TIMEOUTS}
        return settings | {"optimizer": kvps.SGD(lr=LR, momentum=MOMENTUM)} | dict(self.settings) | more

    def create(self, store: Store, name: str, **settings: Any) -> Job:
        """Create the job, in any place and form."""
        return store.create_job(name, self.parameters(), task=self.task, **self.settings_of(**settings))

    def problems(self, job: Job, first: int = 1) -> list[str]:
        """Return what is not as promised in a job that is over: in its log, from version `first` on, and in its
        weights."""
        rounds, found, last = job.config.unit_rounds, [], first - 1
        assert rounds
        for commit in job.log():
            last, units = commit.version, [c.unit for c in commit.plan.contributions]
            if units != (wanted := list(rounds.units_of(commit.version - 1))):
                found.append(f"version {commit.version} is made of the units {units}, not of {wanted}")
            if old := [c.unit for c in commit.plan.contributions if c.base != commit.version - 1]:
                found.append(f"version {commit.version}: the units {old} were computed on another version")
        if last != VERSIONS:
            found.append(f"the log ends with version {last}, not {VERSIONS}")
        if (sha256 := sha256_of(job.snapshot()[1])) != self.expected():
            found.append(f"the weights are {sha256[:12]}, not {self.expected()[:12]}")
        return found


def sha256_of(params: Params) -> str:
    """Return the sha256 of all weights, as `kvps up --report` does."""
    return hashlib.sha256(b"".join(np.ascontiguousarray(value).tobytes() for value in params.values())).hexdigest()


# -- the oracles ----------------------------------------------------------------------------------------------------


def rounds() -> Iterator[list[tuple[int, np.ndarray]]]:
    """Yield each round: the number of each of its units, and the samples of that. It knows nothing of kvps."""
    for epoch in range(EPOCHS):
        order = np.random.default_rng((SEED, epoch)).permutation(SAMPLES)
        units = [(epoch * PER_EPOCH + k, order[k * BATCH : (k + 1) * BATCH]) for k in range(PER_EPOCH)]
        for first in range(0, PER_EPOCH, PER_ROUND):
            yield units[first : first + PER_ROUND]


class Momentum:
    """SGD with momentum that steps the weights `w` in place, by the mean of gradients that it adds in their order."""

    def __init__(self, w: Params) -> None:
        self._w, self._velocity = w, {name: np.zeros_like(value) for name, value in w.items()}

    def step(self, gradients: list[Params]) -> None:
        for name, value in self._w.items():
            total = gradients[0][name]
            for gradient in gradients[1:]:
                total = total + gradient[name]
            self._velocity[name] = np.float32(MOMENTUM) * self._velocity[name] + total / np.float32(len(gradients))
            value[...] = value - np.float32(LR) * self._velocity[name]


def digits() -> Params:
    """Return the first weights of the digits."""
    return load_task("digits").parameters(SEED)


@cache
def expected_digits() -> str:
    """Return the sha256 of the weights that one loop makes, without anything of kvps but the data."""
    x, y = load_task("digits").data(0, 1, np)
    w = digits()
    momentum = Momentum(w)
    for units in rounds():
        momentum.step([_gradient(w, x[rows], y[rows]) for _, rows in units])
    return sha256_of(w)


def _gradient(w: Params, x: np.ndarray, y: np.ndarray) -> Params:
    """Return the gradient of the mean cross-entropy of an MLP with one hidden layer of ReLU."""
    hidden = np.maximum(x @ w["W1"] + w["b1"], 0)
    logits = hidden @ w["W2"] + w["b2"]
    odds = np.exp(logits - logits.max(1, keepdims=True))
    error = odds / odds.sum(1, keepdims=True)
    error[np.arange(len(y)), y] -= 1
    error /= len(y)
    back = (error @ w["W2"].T) * (hidden > 0)
    return {"W1": x.T @ back, "b1": back.sum(0), "W2": hidden.T @ error, "b2": error.sum(0)}
