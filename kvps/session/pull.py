"""Pulls a session's weights to where the user wants them: in host memory, or on a device while they arrive."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from kvps.arrays.formats import format_of
from kvps.arrays.layout import DTYPE, Array, Layout
from kvps.device.base import CPU, Device, DeviceBuffer, empty
from kvps.protocol.job_state import RoundState
from kvps.transport.access import JobAccess
from kvps.transport.base import Transport
from kvps.transport.weight_reader import PullRequest


class Pulled:
    """The weights of one pull: `flat`, (size,) float32 in the order of the layout, and by name."""

    def __init__(self, layout: Layout, flat: Any) -> None:
        self.flat = flat
        self._layout = layout
        self._views: dict[str, Any] = {}

    def named(self, part: str = "") -> dict[str, Any]:
        """Return name -> array; with a `part` of the model, only its weights."""
        if not self._views:
            cut = self._layout.views if isinstance(self.flat, np.ndarray) else self._layout.cut
            self._views = cut(self.flat)
        if not part:
            return dict(self._views)
        return {p.name: self._views[p.name] for p in self._layout.parameters_in(part)}


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
        self._inline: Array | None = None
        if self._reader.receives and not format_of(access.config.weight_format).lossy:
            small = access.layout.nbytes <= access.client.small_bytes
            beside = access.config.unit_rounds and small  # a unit comes before its pull: the last one's stay until then
            self._inline = np.empty(access.layout.size, DTYPE) if beside else self._into
        self._pulled = Pulled(access.layout, np.empty(0, DTYPE))
        weakref.finalize(self, self._reader.close)  # if a session is dropped without leaving

    @property
    def inline_buffer(self) -> Array | None:
        """The array that receives a small model's weights together with a round state; None if they are read
        separately."""
        return self._inline

    def pull(
        self, round_state: RoundState, inline: bool, rounds_done: int, newest: Callable[[], RoundState], part: str
    ) -> tuple[int, Pulled]:
        """Return the weights of this round state, or newer ones, and their version. With a `part` of the model, only
        its weights are there.

        `inline` says that they are already in `inline_buffer`, `newest` returns the newest round state. Raises
        SharedMemoryLost, DeviceFailed, and what `WeightReader.read` raises.
        """
        self._on_device = self._on_device or self._where.landing(self._layout.size)
        if self._on_device:
            self._on_device.begin()
        arrived = self._on_device.arrived if self._on_device else None
        if inline and self._inline is not None:
            version, flat = round_state.version, self._into
            if self._inline is not flat:
                np.copyto(flat, self._inline)
        else:
            request = PullRequest(round_state, rounds_done, newest, self._into, arrived, part)
            version, _, flat = self._reader.read(request)
        where = self._on_device.whole(flat) if self._on_device else flat
        if where is not self._pulled.flat:
            self._pulled = Pulled(self._layout, where)
        return version, self._pulled

    def close(self) -> None:
        """Cancel a fetch that is under way."""
        self._reader.close()
