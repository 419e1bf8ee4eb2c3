"""One shard of a job whose versions a learner makes: the next version is what the learner has given. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from kvps.arrays.given import Given
from kvps.arrays.layout import Array, Layout
from kvps.arrays.pieces import Chunk
from kvps.config import JobConfig
from kvps.protocol.plan import Plan
from kvps_aggregator.step.shard_arrays import ShardArrays


class GivenArrays(ShardArrays):
    """Shard `number` of such a job. The next version is this shard's part of `given`, which does not change while a
    version is made."""

    def __init__(self, config: JobConfig, layout: Layout, number: int, given: Given) -> None:
        super().__init__(config, layout, number)
        self.given = given
        self.next_weights = given.flat[self.low : self.high]

    def step(
        self, plan: Plan, chunk: Chunk, gradients: Iterable[Array], reduced: Callable[[float], None] | None = None
    ) -> bool:
        if reduced:
            reduced(0.0)
        return True

    def promote(self) -> None:
        np.copyto(self.weights, self.next_weights)
