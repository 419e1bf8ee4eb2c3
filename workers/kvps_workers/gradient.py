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
    """Return the mean loss and gradient over the rows of a round, which has one batch.

    It is the sum of the shares of `rounds.procs` processes, whether these compute them or this process does alone.
    Raises TaskFailed, and LayoutMismatch if there are several gradients and one of them does not fit the job.
    """
    shares = (share_of(task, layout, rounds, number, params, xp, part) for part in range(rounds.procs))
    return sum_of_shares(layout, shares)


def share_of(
    task: Task, layout: Layout, rounds: Rounds, number: int, params: Mapping[str, Any], xp: ModuleType, part: int
) -> Gradient | None:
    """Return what process `part` adds to a round's gradient; None if there are fewer rows than processes.

    It is rows / all rows of the round * gradient, of the process's part of the batch. Raises as `round_gradient` does.
    """
    batch = rounds.rows(number)
    rows = np.array_split(batch, rounds.procs)[part]
    if not len(rows):
        return None
    gradient = Gradient(*task.gradient(params, rounds.samples(rows), xp))
    return gradient if len(rows) == len(batch) else _weighted(layout, gradient, len(rows) / len(batch), xp)


def sum_of_shares(layout: Layout, shares: Iterable[Gradient | None]) -> Gradient:
    """Return the sum of the shares of a round, added in float32 in the order of the processes."""
    first, *rest = (share for share in shares if share is not None)
    if not rest:
        return first
    total: Array = np.concatenate(layout.hosted(first.grads, "gradient"))
    for share in rest:
        np.add(total, np.concatenate(layout.hosted(share.grads, "gradient")), out=total)
    return Gradient(first.loss + sum(share.loss for share in rest), layout.views(total))


def _weighted(layout: Layout, gradient: Gradient, weight: float, xp: ModuleType) -> Gradient:
    """Return weight * gradient, rounded to float32."""
    grads = {
        layout.parameters[number].name: xp.asarray(xp.multiply(xp.asarray(array), np.float32(weight)))
        for number, array in layout.rest(gradient.grads, "gradient").items()
    }
    return Gradient(weight * gradient.loss, grads)
