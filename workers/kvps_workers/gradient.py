"""The gradient that a worker pushes for one round, in a fixed order of float32 operations.

Training and `kvps verify` both use this module, so a replay makes the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from kvps.arrays.layout import Layout
from kvps_workers.rounds import Rounds
from kvps_workers.task import Task


class Gradient(NamedTuple):
    """A mean loss, and its gradient: name -> float32 array."""

    loss: float
    grads: Mapping[str, Any]


def round_gradient(
    task: Task, layout: Layout, rounds: Rounds, number: int, params: Mapping[str, Any], xp: ModuleType
) -> Gradient:
    """Return the mean loss and gradient over all rows of a round, all on the same weights.

    Raises TaskFailed, and LayoutMismatch if there are several gradients and one of them does not fit the job.
    """
    batches = rounds.batches(number)
    total = sum(map(len, batches))
    gradients = (Gradient(*task.gradient(params, rounds.samples(rows), xp)) for rows in batches)
    if len(batches) == 1:
        return next(gradients)
    return _weighted_sum(layout, zip(gradients, (len(rows) / total for rows in batches), strict=True), xp)


def _weighted_sum(layout: Layout, terms: Iterable[tuple[Gradient, float]], xp: ModuleType) -> Gradient:
    """Return the sum of weight * gradient: each product and each sum is rounded to float32, in the order of `terms`."""
    loss, sums = 0.0, dict[str, Any]()
    for gradient, weight in terms:
        loss += weight * gradient.loss
        for number, array in layout.rest(gradient.grads, "gradient", lambda _: False).items():
            name = layout.parameters[number].name
            product = xp.asarray(xp.multiply(xp.asarray(array), np.float32(weight)))
            sums[name] = xp.add(sums[name], product, out=sums[name]) if name in sums else product
    return Gradient(loss, sums)
