"""Pulls a session's weights to where the user wants them: in host memory, or on a device while they arrive."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from kvps.arrays.formats import format_of
from kvps.arrays.layout import DTYPE, Array
from kvps.device.base import CPU, Device, DeviceBuffer, empty
from kvps.protocol.job_state import RoundState
from kvps.transport.access import JobAccess
from kvps.transport.base import Transport
from kvps.transport.weight_reader import PullRequest


class WeightPull:
    """The pulls of one session, which alone calls it. Weights that it returns are valid until it returns the next."""

    def __init__(self, access: JobAccess, transport: Transport, device: Device | str, prefetch: bool) -> None:
        named, where = (device, CPU) if isinstance(device, str) else (device.name, device)
        self._layout = access.layout
        self._where = where
        self._on_device: DeviceBuffer | None = None  # made by the first pull: a full device fails no join
        memory = partial(empty, access.layout.size, named)
        self._reader = transport.weight_reader(memory, prefetch)
        self._into: Array = memory() if self._reader.receives else np.empty(0, DTYPE)
        self._inline = self._reader.receives and not format_of(access.config.weight_format).lossy
        self._flat: Array = np.empty(0, DTYPE)
        self._views: dict[str, Array] = {}
        weakref.finalize(self, self._reader.close)  # if a session is dropped without leaving

    @property
    def inline_buffer(self) -> Array | None:
        """The array that receives a small model's weights together with a round state; None if they are read
        separately."""
        return self._into if self._inline else None

    def pull(
        self, round_state: RoundState, inline: bool, rounds_done: int, newest: Callable[[], RoundState], part: str
    ) -> tuple[int, dict[str, Any]]:
        """Return the weights of this round state, or newer ones: their version, and name -> array. With a `part` of the
        model, only its weights.

        `inline` says that they are already in `inline_buffer`, `newest` returns the newest round state. Raises
        SharedMemoryLost, DeviceFailed, and what `WeightReader.read` raises.
        """
        self._on_device = self._on_device or self._where.landing(self._layout.size)
        if self._on_device:
            self._on_device.begin()
        arrived = self._on_device.arrived if self._on_device else None
        if inline:
            version, flat = round_state.version, self._into
        else:
            request = PullRequest(round_state, rounds_done, newest, self._into, arrived, part)
            version, _, flat = self._reader.read(request)
        if flat is not self._flat:
            self._flat, self._views = flat, self._layout.views(flat)
        views = self._layout.cut(self._on_device.whole(flat)) if self._on_device else self._views
        if not part:
            return version, dict(views)
        return version, {p.name: views[p.name] for p in self._layout.parameters_in(part)}

    def close(self) -> None:
        """Cancel a fetch that is under way."""
        self._reader.close()
