"""A shard that is reduced and stepped on a device, with a copy in host memory for Redis and for digests."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvps.arrays.layout import Array, Layout
from kvps.arrays.pieces import Chunk
from kvps.config import JobConfig
from kvps.device.base import Device
from kvps.protocol.plan import Plan
from kvps_aggregator.step.shard_arrays import ShardArrays


class DeviceStep(ShardArrays):
    """A shard in host memory with a twin on `device`, which does the computing.

    Contributions are uploaded and results downloaded chunk by chunk. Weights and state stay on the device, and are
    uploaded only after they were loaded. The results are bit for bit those of a `ShardArrays` in host memory.
    """

    def __init__(self, config: JobConfig, layout: Layout, number: int, device: Device) -> None:
        super().__init__(config, layout, number)
        self._device = device
        with device.current():
            self._there = ShardArrays(config, layout, number, device.exact)

    def loaded(self) -> None:
        self._there.skipped = self.skipped
        self._there.weights = self._device.upload(self.weights)
        self._there.state = {slot: self._device.upload(self.state[slot]) for slot in self._there.slots}

    def step(
        self, plan: Plan, chunk: Chunk, gradients: Iterable[Array], reduced: Callable[[float], None] | None = None
    ) -> bool:
        with self._device.current():
            finite = self._there.step(plan, chunk, map(self._device.upload, gradients), reduced)
        self._bring(chunk)
        return finite

    def reduce(self, plan: Plan, chunk: Chunk, gradients: Iterable[Array], out: Array) -> float:
        with self._device.current():
            total = self._there.scratch(out.size)
            square_sum = self._there.reduce(plan, chunk, map(self._device.upload, gradients), total)
            self._device.download(total, out)
        return square_sum

    def apply(self, plan: Plan, chunk: Chunk, gradient: Array) -> None:
        with self._device.current():
            self._there.apply(plan, chunk, self._device.upload(gradient))
        self._bring(chunk)

    def _bring(self, chunk: Chunk) -> None:
        """Download a chunk of the next version, and make that of the view."""
        there = self._there
        self.next_skipped = there.next_skipped
        with self._device.current():
            self._device.download(self.stretch(there.next_weights, chunk), self.stretch(self.next_weights, chunk))
            for slot in there.slots:
                self._device.download(
                    self.stretch(there.next_state[slot], chunk), self.stretch(self.next_state[slot], chunk)
                )
        self.advance_view(chunk)

    def promote(self) -> None:
        super().promote()
        self._there.promote()
