"""A shard that is reduced and stepped on a device, and is in host memory too, where Redis and digests have it from."""

from __future__ import annotations

from collections.abc import Iterable

from kvps.arrays.layout import Array, Chunk, Layout
from kvps.config import JobConfig
from kvps.device.base import Device
from kvps.protocol.plan import Plan
from kvps_aggregator.step.shard_arrays import ShardArrays


class DeviceStep(ShardArrays):
    """A part with a twin on `device`, which does the computing.

    Chunk by chunk contributions go up, and what was made of them comes down; weights and state stay on the device, and
    go there only when they were read anew. Bit for bit what a part alone makes.
    """

    def __init__(self, config: JobConfig, layout: Layout, number: int, device: Device) -> None:
        super().__init__(config, layout, number)
        self._device = device
        with device.current():
            self._there = ShardArrays(config, layout, number, device.exact)

    def loaded(self) -> None:
        self._there.weights = self._device.upload(self.weights)
        self._there.state = {slot: self._device.upload(array) for slot, array in self.state.items()}

    def step(self, plan: Plan, chunk: Chunk, gradients: Iterable[Array]) -> bool:
        there = self._there
        with self._device.current():
            finite = there.step(plan, chunk, map(self._device.upload, gradients))
            self._device.download(self.stretch(there.next_weights, chunk), self.stretch(self.next_weights, chunk))
            for slot, array in self.next_state.items():
                self._device.download(self.stretch(there.next_state[slot], chunk), self.stretch(array, chunk))
        return finite

    def promote(self) -> None:
        super().promote()
        self._there.promote()
