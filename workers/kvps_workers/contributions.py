"""What a worker pushes in each round: the gradient of one batch, in a fixed order of float32 operations.

Training and `kvps verify` both compute here, so a replay makes the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from kvps.arrays.layout import Array, Layout
from kvps.config import JobConfig
from kvps_workers.rounds import Rounds
from kvps_workers.task import Task


class Gradient(NamedTuple):
    """A mean loss, and its gradient: name -> float32 array."""

    loss: float
    grads: Mapping[str, Any]


class Contributions:
    """The contributions of the worker of one rank, by the numbers of their rounds or units, from 0.

    Each is the sum of the shares of `procs` processes, whether these compute them or this process does alone.
    """

    def __init__(self, config: JobConfig, layout: Layout, task: Task, rank: int, xp: ModuleType = np) -> None:
        self.config, self.layout, self.rank = config, layout, rank
        self.rounds = Rounds(task, config, rank, xp)
        self._task, self._xp = task, xp

    def compute(self, params: Mapping[str, Any], number: int) -> Gradient:
        """Return a contribution. Raises TaskFailed, and LayoutMismatch if there are several gradients and one of them
        does not fit the job."""
        return self.sum_of(self.share(params, number, part) for part in range(self.config.metadata.procs))

    def share(self, params: Mapping[str, Any], number: int, part: int) -> Gradient | None:
        """Return what process `part` adds to a contribution; None if the batch has fewer rows than there are processes.

        It is rows / all rows of the batch * gradient, of the process's part of the batch. Raises as `compute` does.
        """
        batch = self.rounds.rows(number)
        rows = np.array_split(batch, self.config.metadata.procs)[part]
        if not len(rows):
            return None
        gradient = Gradient(*self._task.gradient(params, self.rounds.samples(rows), self._xp))
        return gradient if len(rows) == len(batch) else self._weighted(gradient, len(rows) / len(batch))

    def sum_of(self, shares: Iterable[Gradient | None]) -> Gradient:
        """Return the sum of the shares of a contribution, added in float32 in the order of the processes."""
        first, *rest = (share for share in shares if share is not None)
        if not rest:
            return first
        total: Array = np.concatenate(self.layout.hosted(first.grads, "gradient"))
        for share in rest:
            np.add(total, np.concatenate(self.layout.hosted(share.grads, "gradient")), out=total)
        return Gradient(first.loss + sum(share.loss for share in rest), self.layout.views(total))

    def _weighted(self, gradient: Gradient, weight: float) -> Gradient:
        """Return weight * gradient, rounded to float32."""
        xp = self._xp
        grads = {
            self.layout.parameters[number].name: xp.asarray(xp.multiply(xp.asarray(array), np.float32(weight)))
            for number, array in self.layout.rest(gradient.grads, "gradient").items()
        }
        return Gradient(weight * gradient.loss, grads)

    def weight(self, number: int) -> int | None:
        """Return the weight of a contribution, its number of samples; None where all count alike."""
        return len(self.rounds.rows(number)) if self.config.reduction == "weighted" else None
