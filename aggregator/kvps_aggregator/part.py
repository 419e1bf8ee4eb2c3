"""One shard in memory: its weights and optimizer state, and beside them the next version's. Pure, without Redis.

The holder of a shard and the replay of a log compute with this one class: what the one commits the other gets, bit
for bit.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvps import wire
from kvps.config import JobConfig
from kvps.layout import DTYPE, Array, Layout
from kvps.plan import Plan
from kvps_aggregator import optimizers, reduce

_STRETCH = 1 << 16  # items stepped at a time: what a step touches stays in the cache


class Part:
    """The `number`-th shard of a job. Arrays are (size,) float32; `state` is slot name -> array, zeros at first.

    A version is made by `begin`, then for each contribution that counts, in the plan's order, its bytes into
    `incoming` and `add`, then `step`. The present one stays as it is until `promote`.
    """

    def __init__(self, config: JobConfig, layout: Layout, number: int) -> None:
        self.chunks = layout.chunks[number]
        self.low, self.high = layout.shard_range(number)
        self.size = self.high - self.low
        self.slots = config.optimizer.slots
        self.weights, self.next_weights = self._empty(), self._empty()
        self.state = {slot: np.zeros(self.size, DTYPE) for slot in self.slots}
        self.next_state = {slot: self._empty() for slot in self.slots}
        self.incoming, self._total = self._empty(), self._empty()
        self._added = 0
        self._config = config

    def _empty(self) -> Array:
        return np.empty(self.size, DTYPE)

    def begin(self) -> None:
        """Forget what was added."""
        self._added = 0

    def add(self) -> None:
        """Add what stands in `incoming`; the sum begins with the first."""
        if self._added:
            reduce.add(self._total, self.incoming)
        else:
            self._total, self.incoming = self.incoming, self._total
        self._added += 1

    def step(self, plan: Plan) -> None:
        """Make the plan's version of what was added."""
        if not plan.contributions:  # all were rejected: a version without a step
            np.copyto(self.next_weights, self.weights)
            for slot in self.slots:
                np.copyto(self.next_state[slot], self.state[slot])
            return
        if not self._added:
            self._total.fill(0)
        config = self._config
        reduce.finish(self._total, config.reduction, plan.divisor)
        lr = config.optimizer.lr_at(plan.progress / config.workers)
        for i in range(0, self.size, _STRETCH):
            part_of = slice(i, i + _STRETCH)
            optimizers.update(
                *(config.optimizer, lr, plan.version, self.weights[part_of], self._total[part_of]),
                {slot: array[part_of] for slot, array in self.state.items()},
                self.next_weights[part_of],
                {slot: array[part_of] for slot, array in self.next_state.items()},
            )

    def promote(self) -> None:
        """Go on from the next version."""
        self.weights, self.next_weights = self.next_weights, self.weights
        self.state, self.next_state = self.next_state, self.state

    def stretches(self, array: Array) -> Iterator[memoryview]:
        """The memory of each chunk in an array of this shard."""
        return (wire.view(array[c.start - self.low : c.stop - self.low]) for c in self.chunks)

    def digest(self, array: Array) -> str:
        """The digest of an array of this shard, as contributions and commits log it."""
        return wire.fold(wire.digest([stretch]) for stretch in self.stretches(array))
