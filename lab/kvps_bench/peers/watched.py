"""What the watched runs train: a softmax regression in NumPy, on points around ten centres."""

from __future__ import annotations

import numpy as np

CLASSES, INPUTS, BATCH = 10, 64, 128


class Regression:
    """Samples of one worker. Workers of different seeds draw different samples around the same centres."""

    def __init__(self, seed):
        self._centres = np.random.default_rng(0).normal(size=(CLASSES, INPUTS)).astype(np.float32)
        self._random = np.random.default_rng(seed)

    @staticmethod
    def start():
        return np.zeros((INPUTS, CLASSES), np.float32)

    def loss_and_gradient(self, weights):
        """Return the mean loss of a new batch, in nats, and its gradient."""
        labels = self._random.integers(CLASSES, size=BATCH)
        x = self._centres[labels] + 2 * self._random.normal(size=(BATCH, INPUTS)).astype(np.float32)
        scores = x @ weights
        scores -= scores.max(axis=1, keepdims=True)
        shares = np.exp(scores)
        shares /= shares.sum(axis=1, keepdims=True)
        loss = -float(np.log(shares[np.arange(BATCH), labels] + 1e-12).mean())
        shares[np.arange(BATCH), labels] -= 1
        return loss, x.T @ shares / BATCH
