"""The weights that a session pulls, where the user has them: in host memory, or on a device as they come."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from kvps.arrays.layout import DTYPE, Array
from kvps.device.base import CPU, Device, DeviceBuffer, empty
from kvps.protocol.job_state import Turn
from kvps.transport.access import JobAccess
from kvps.transport.base import Transport


class WeightPull:
    """Of one session, which alone calls it. What it hands out is valid until it hands out the next."""

    def __init__(self, access: JobAccess, transport: Transport, device: Device | str, prefetch: bool) -> None:
        named, where = (device, CPU) if isinstance(device, str) else (device.name, device)
        self._layout = access.layout
        self._where = where
        self._on_device: DeviceBuffer | None = None  # made by the first pull: a device without room fails no join
        self._source = transport.weight_source(partial(empty, access.layout.size, named), prefetch)
        self._flat: Array = np.empty(0, DTYPE)
        self._views: dict[str, Array] = {}

    @property
    def inline_buffer(self) -> Array | None:
        """Where the weights of a small model may come together with a turn; None if they come otherwise."""
        return self._source.inline_buffer

    def weights(
        self, turn: Turn, inline: bool, rounds_done: int, look: Callable[[], Turn]
    ) -> tuple[int, dict[str, Any]]:
        """The weights of this turn, or newer ones: their version, and name -> array.

        `inline` is whether they are in `inline_buffer`, `look` how the session finds the newest turn. Raises
        SharedMemoryLost, DeviceFailed, and what `VersionReader.weights` and `look` raise.
        """
        self._on_device = self._on_device or self._where.landing(self._layout.size)
        if self._on_device:
            self._on_device.begin()
        arrived = self._on_device.arrived if self._on_device else None
        version, flat = self._source.weights(turn, inline, rounds_done, look, arrived)
        if flat is not self._flat:
            self._flat, self._views = flat, self._layout.views(flat)
        return version, self._layout.cut(self._on_device.whole(flat)) if self._on_device else dict(self._views)

    def close(self) -> None:
        """Forget what is coming."""
        self._source.close()
