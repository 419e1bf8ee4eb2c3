"""Encodes gradients for sending: as their plain float32, or in a shorter format with its residual."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from kvps.arrays.error_feedback import DeviceResidual, Residual
from kvps.arrays.formats import chunk_sizes, format_of
from kvps.arrays.layout import CHUNK_ITEMS, DTYPE, Array
from kvps.connection.sockets import ChunkGone
from kvps.device.base import CPU, Cuda, Device, Flat, PinnedStaging, device_of, on_device
from kvps.errors import CorruptData, DeviceFailed, JobNotFound, ServerFull, WorkerEvicted
from kvps.session.buffers import GradientBuffers
from kvps.session.membership import Membership
from kvps.session.residual_store import ResidualStore
from kvps.transport.access import JobAccess


class Encoder:
    """The encoder of one session. `inherited` is the name of the residual that the last incarnation stored, or "".

    lossy     whether the format leaves something out
    sizes     bytes of each chunk
    residual  the sum that the format has left out so far; None before the first gradient, and for fp32
    """

    def __init__(self, access: JobAccess, membership: Membership, inherited: str) -> None:
        self._format = format_of(access.config.gradient_format)
        self.lossy = self._format.lossy
        self.sizes = chunk_sizes(access.layout, self._format)
        self.residual: Residual | None = None
        self._layout = access.layout
        self._membership = membership
        self._store = ResidualStore(access.client, access.keys, access.layout, membership.worker)
        self._inherited = inherited
        self._staging = PinnedStaging(access.layout.size, CHUNK_ITEMS)

    @property
    def home(self) -> Device:
        """The device where gradients are encoded; host memory if that does not matter."""
        return self.residual.home if self.residual else CPU

    def flat(self, grads: Mapping[int, Any], buffers: GradientBuffers | None) -> dict[int, Flat]:
        """Return gradients, by their numbers in the layout, flat in host memory or on their way there; on a device, if
        they are encoded there. The first gradient that is on a device decides where gradients are encoded.

        Raises LayoutMismatch for a gradient that is in another one's place in `buffers`, DeviceFailed, CorruptData.
        """
        if self.lossy and not self.residual:
            self.residual = self._inherit(device_of(grads.values()))
        return {number: self._flat(number, grad, buffers) for number, grad in grads.items()}

    def _flat(self, number: int, grad: Any, buffers: GradientBuffers | None) -> Flat:
        parameter = self._layout.parameters[number]
        if self.home is CPU and on_device(grad):
            return self._staging.bring(grad, parameter.start)
        array = self.home.flat(grad)
        if buffers:
            buffers.check_place(parameter.name, array)
        return array

    def _inherit(self, home: Device) -> Residual:
        """Return the residual that the last incarnation stored; zeros if it stored none."""
        values: Array = np.zeros(self._layout.size, DTYPE)
        if self._inherited:
            try:
                self._store.load(self._inherited, values)
            except ChunkGone as gone:
                self._membership.look()  # raises if a newer incarnation freed it
                worker = self._membership.worker
                raise CorruptData(f"the residual that {worker!r} stored when it left is not there: {gone}") from None
        if isinstance(home, Cuda):
            return DeviceResidual(self._format, values, self._layout, home)
        return Residual(self._format, values)

    def keep(self) -> None:
        """Note that the last encoded contribution was accepted: what it left out goes into the next one."""
        if self.residual:
            self.residual.keep()

    def save(self) -> str:
        """Store the residual of all that was accepted, for the next incarnation. Return its name, "" if it cannot."""
        me = self._membership
        if not me.sequence:
            return self._inherited
        if self.residual:
            with contextlib.suppress(WorkerEvicted, ServerFull, JobNotFound, DeviceFailed):
                if me.check(me.look()).accepted == me.sequence:
                    return self._store.save(me.incarnation, me.sequence, self.residual.values)
        return ""

    def stored_keys(self, name: str) -> list[str]:
        """Return the keys under which `save` stored the residual `name`."""
        return self._store.keys(name) if name else []
