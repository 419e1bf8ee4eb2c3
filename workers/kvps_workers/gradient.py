"""The gradient that a worker pushes for one round, in a fixed order of float32 operations.

Training and `kvps verify` both use this module, so a replay makes the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from kvps.arrays.layout import Array, Layout
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

    It is the sum of the shares of `rounds.procs` processes, whether these compute them or this process does alone.
    Raises TaskFailed, and LayoutMismatch if there are several gradients and one of them does not fit the job.
    """
    shares = (share_of(task, layout, rounds, number, params, xp, part) for part in range(rounds.procs))
    return sum_of_shares(layout, shares)


def share_of(
    task: Task, layout: Layout, rounds: Rounds, number: int, params: Mapping[str, Any], xp: ModuleType, part: int
) -> Gradient | None:
    """Return what process `part` adds to a round's gradient; None if there are fewer rows than processes.

    It is the sum of rows / all rows of the round * gradient, over the process's part of each batch. Raises as
    `round_gradient` does.
    """
    batches = rounds.batches(number)
    total = sum(map(len, batches))
    parts = [rows for batch in batches if len(rows := np.array_split(batch, rounds.procs)[part])]
    gradients = (Gradient(*task.gradient(params, rounds.samples(rows), xp)) for rows in parts)
    if not parts:
        return None
    if len(parts[0]) == total:
        return next(gradients)
    return _weighted_sum(layout, zip(gradients, (len(rows) / total for rows in parts), strict=True), xp)


def sum_of_shares(layout: Layout, shares: Iterable[Gradient | None]) -> Gradient:
    """Return the sum of the shares of a round, added in float32 in the order of the processes."""
    first, *rest = (share for share in shares if share is not None)
    if not rest:
        return first
    total: Array = np.concatenate(layout.hosted(first.grads, "gradient"))
    for share in rest:
        np.add(total, np.concatenate(layout.hosted(share.grads, "gradient")), out=total)
    return Gradient(first.loss + sum(share.loss for share in rest), layout.views(total))


def _weighted_sum(layout: Layout, terms: Iterable[tuple[Gradient, float]], xp: ModuleType) -> Gradient:
    """Return the sum of weight * gradient: each product and each sum is rounded to float32, in the order of `terms`."""
    loss, sums = 0.0, dict[str, Any]()
    for gradient, weight in terms:
        loss += weight * gradient.loss
        for number, array in layout.rest(gradient.grads, "gradient").items():
            name = layout.parameters[number].name
            product = xp.asarray(xp.multiply(xp.asarray(array), np.float32(weight)))
            sums[name] = xp.add(sums[name], product, out=sums[name]) if name in sums else product
    return Gradient(loss, sums)
