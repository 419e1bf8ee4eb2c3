"""The job that is trained in many ways, an oracle for its weights in plain NumPy, and the judge of a run."""

from __future__ import annotations

import hashlib
from functools import cache
from typing import Any

import numpy as np
from kvps_workers import load_task

import kvps
from kvps.job import Job
from kvps.store import Store

SEED, LR, MOMENTUM = 0, 0.5, 0.5
BATCH, EPOCHS, PER_EPOCH, PER_ROUND = (
    96,
    4,
    15,
    6,
)  # 1,438 samples: the last unit of an epoch and its last round are short
UNITS = EPOCHS * PER_EPOCH
VERSIONS = EPOCHS * 3
TIMEOUTS = {"lease_ms": 300, "worker_timeout_ms": 5000}
Params = dict[str, np.ndarray]


def create(store: Store, name: str, **settings: Any) -> Job:
    """Create the job, in any place and form."""
    return store.create_job(name, parameters(), **settings_of(**settings))


def parameters() -> Params:
    """Return the first weights."""
    return load_task("digits").parameters(SEED)


def settings_of(**more: Any) -> dict[str, Any]:
    """Return the settings of the job, with `more` that say where and how it is trained."""
    settings = {"units": UNITS, "units_per_epoch": PER_EPOCH, "units_per_round": PER_ROUND, **TIMEOUTS}
    settings |= {"task": "digits", "seed": SEED, "batch_size": BATCH, "epochs": EPOCHS}
    return settings | {"optimizer": kvps.SGD(lr=LR, momentum=MOMENTUM)} | more


# -- the oracle -----------------------------------------------------------------------------------------------------


@cache
def expected() -> str:
    """Return the sha256 of the weights that one loop makes, without anything of kvps but the data."""
    task = load_task("digits")
    x, y = task.data(0, 1, np)
    w = parameters()
    velocity = {name: np.zeros_like(value) for name, value in w.items()}
    for epoch in range(EPOCHS):
        order = np.random.default_rng((SEED, epoch)).permutation(len(x))
        units = [order[first : first + BATCH] for first in range(0, len(order), BATCH)]
        for first in range(0, len(units), PER_ROUND):
            gradients = [_gradient(w, x[rows], y[rows]) for rows in units[first : first + PER_ROUND]]
            for name in w:
                total = gradients[0][name]
                for gradient in gradients[1:]:
                    total = total + gradient[name]
                velocity[name] = np.float32(MOMENTUM) * velocity[name] + total / np.float32(len(gradients))
                w[name] = w[name] - np.float32(LR) * velocity[name]
    return hashlib.sha256(b"".join(np.ascontiguousarray(value).tobytes() for value in w.values())).hexdigest()


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


# -- the judge ------------------------------------------------------------------------------------------------------


def problems(job: Job, first: int = 1) -> list[str]:
    """Return what is not as promised in a job that is over: in its log, from version `first` on, and in its weights."""
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
    if (sha256 := sha256_of(job.snapshot()[1])) != expected():
        found.append(f"the weights are {sha256[:12]}, not {expected()[:12]}")
    return found


def sha256_of(params: Params) -> str:
    """Return the sha256 of all weights, as `kvps up --report` does."""
    return hashlib.sha256(b"".join(np.ascontiguousarray(value).tobytes() for value in params.values())).hexdigest()
