"""The built-in task: an MLP on scikit-learn's 1,797 handwritten digits of 8 x 8 pixels, a fifth held out.

x (n, 64) -> W1 (64, 64), b1 -> ReLU -> W2 (64, 10), b2 -> softmax -> cross-entropy with y (n,)
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from kvps.errors import install

_HIDDEN = 64
_SPLIT_SEED = 20  # which samples are held out is part of the task, not of a run


class Digits:
    """A multilayer perceptron that reads digits. Needs scikit-learn for its bundled data."""

    batch_size = 32
    epochs = 30
    lr = 0.5
    units_per_round, units_lr = 6, 1.0

    def __init__(self) -> None:
        x, y = _load()
        order = np.random.default_rng(_SPLIT_SEED).permutation(len(x))
        held_out = len(x) // 5
        self._x = (x[order] / 16).astype(np.float32)
        self._y = y[order].astype(np.int64)
        self._test = slice(0, held_out)
        self._train = slice(held_out, None)

    def parameters(self, seed: int) -> dict[str, Any]:
        """Return parameters by He's initialisation for the ReLU layer, by Glorot's for the last."""
        rng = np.random.default_rng(seed)
        return {
            "W1": rng.normal(0, np.sqrt(2 / 64), (64, _HIDDEN)).astype(np.float32),
            "b1": np.zeros(_HIDDEN, np.float32),
            "W2": rng.normal(0, np.sqrt(1 / _HIDDEN), (_HIDDEN, 10)).astype(np.float32),
            "b2": np.zeros(10, np.float32),
        }

    def data(self, rank: int, workers: int, xp: ModuleType) -> tuple[Any, ...]:
        """Return every `workers`-th training sample, beginning with sample `rank`."""
        return xp.asarray(self._x[self._train][rank::workers]), xp.asarray(self._y[self._train][rank::workers])

    def gradient(
        self, params: Mapping[str, Any], batch: tuple[Any, ...], xp: ModuleType
    ) -> tuple[float, dict[str, Any]]:
        """Return the cross-entropy and its gradient, derived by hand so that the task needs no framework."""
        x, y = batch
        hidden, p, loss = _forward(params, x, y, xp)
        p[xp.arange(len(y)), y] -= 1
        p /= len(y)
        back = (p @ params["W2"].T) * (hidden > 0)
        return loss, {"W1": x.T @ back, "b1": back.sum(0), "W2": hidden.T @ p, "b2": p.sum(0)}

    def evaluate(self, params: Mapping[str, Any], xp: ModuleType) -> dict[str, float]:
        """Return the loss and the accuracy on the held-out fifth."""
        x, y = xp.asarray(self._x[self._test]), xp.asarray(self._y[self._test])
        _, p, loss = _forward(params, x, y, xp)
        return {"loss": loss, "accuracy": float((p.argmax(1) == y).mean())}


@cache
def _load() -> tuple[Any, Any]:
    """Return pixels (n, 64) and labels (n,), as scikit-learn has them.

    They are read from scikit-learn's data file: importing scikit-learn takes longer than everything else that a worker
    does until it has joined. Several workers of one process read them once.
    """
    spec = importlib.util.find_spec("sklearn")
    if spec is None or spec.origin is None:
        raise ImportError(f"digits needs scikit-learn's data: {install('demo')}")
    table = np.loadtxt(Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    return table[:, :-1], table[:, -1]


def _forward(params: Mapping[str, Any], x: Any, y: Any, xp: ModuleType) -> tuple[Any, Any, float]:
    """Return the hidden layer, the probability of each digit, and the mean cross-entropy."""
    hidden = xp.maximum(x @ params["W1"] + params["b1"], 0)
    z = hidden @ params["W2"] + params["b2"]
    e = xp.exp(z - z.max(1, keepdims=True))
    p = e / e.sum(1, keepdims=True)
    return hidden, p, -float(xp.log(p[xp.arange(len(y)), y] + 1e-12).mean())
