"""Encodes gradients for sending: as their plain float32, or in a shorter format with its residual."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvps.arrays.error_feedback import DeviceResidual, Residual
from kvps.arrays.formats import chunk_sizes, format_of
from kvps.arrays.layout import CHUNK_ITEMS, DTYPE, Array
from kvps.arrays.number_ranges import numbers_in
from kvps.arrays.runs import Runs
from kvps.connection.sockets import ChunkGone
from kvps.device.base import CPU, Cuda, Device, Flat, PinnedStaging, device_of, on_device
from kvps.errors import CorruptData, DeviceFailed, JobNotFound, ServerFull, WorkerEvicted
from kvps.session.buffers import GradientBuffers
from kvps.session.inner_state import from_bytes
from kvps.session.membership import Membership
from kvps.session.residual_store import ResidualStore
from kvps.session.upload import Gradients
from kvps.transport.access import JobAccess


class Encoder:
    """The encoder of one session. `inherited` is the name of the residual that the last incarnation stored, or "".

    lossy     whether the format leaves something out
    sizes     bytes of each chunk
    runs      the parameters that are encoded together
    residual  the sum that the format has left out so far; None before the first gradient, and for fp32
    """

    def __init__(self, access: JobAccess, membership: Membership, inherited: str) -> None:
        self._format = format_of(access.config.gradient_format)
        self.lossy = self._format.lossy
        self.sizes = chunk_sizes(access.layout, self._format)
        self.residual: Residual | None = None
        self._layout = access.layout
        self.runs = Runs(access.layout)
        self._membership = membership
        self._store = ResidualStore(access.client, access.keys, access.layout, membership.worker)
        self._inherited = inherited
        self._gathered: Array | None = None
        self._staging = PinnedStaging(access.layout.size, CHUNK_ITEMS)

    @property
    def home(self) -> Device:
        """The device where gradients are encoded; host memory if that does not matter."""
        return self.residual.home if self.residual else CPU

    def flat(self, grads: Mapping[int, Any], buffers: GradientBuffers | None) -> list[Gradients]:
        """Return gradients, by their numbers in the layout, flat in host memory or on their way there; on a device, if
        they are encoded there. The first gradient that is on a device decides where gradients are encoded.

        Small neighbours are gathered in one array, which the next call overwrites. Raises LayoutMismatch for a gradient
        that is in another one's place in `buffers`, DeviceFailed, CorruptData.
        """
        if self.lossy and not self.residual:
            self.residual = self._inherit(device_of(grads.values()))
        out = list[Gradients]()
        for run in self.runs.numbers:
            arrays = [grads[number] for number in run if number in grads]
            if len(arrays) == len(run) > 1 and set(map(type, arrays)) == {np.ndarray}:
                out.append(Gradients(run.start, run.stop, self.home.flat(self._gather(run, arrays, buffers))))
                continue
            out += [Gradients(n, n + 1, self._flat(n, grads[n], buffers)) for n in run if n in grads]
        return out

    def whole(self, flat: Array) -> list[Gradients]:
        """Do `flat` for the gradients of all parameters, which lie end to end in one array in host memory."""
        if self.lossy and not self.residual:
            self.residual = self._inherit(CPU)
        runs = zip(self.runs.numbers, self.runs.layout.parameters, strict=True)
        return [Gradients(run.start, run.stop, self.home.flat(flat[p.start : p.stop])) for run, p in runs]

    def _gather(self, run: range, arrays: Sequence[Array], buffers: GradientBuffers | None) -> Array:
        """Return the gradients of a run of parameters, end to end."""
        parameters = self._layout.parameters
        if buffers:
            own = buffers.run(parameters, run, arrays)
            if own is not None:
                return own
            for number, array in zip(run, arrays, strict=True):
                buffers.check_place(parameters[number].name, array)
        start, stop = parameters[run.start].start, parameters[run[-1]].stop
        if self._gathered is None:
            self._gathered = np.empty(self._layout.size, DTYPE)  # a page that is not written to takes no memory
        return np.concatenate(arrays, axis=None, out=self._gathered[start:stop])

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
            with self._there("residual"):
                self._store.load(self._inherited, values)
        if isinstance(home, Cuda):
            return DeviceResidual(self._format, values, self._layout, home)
        return Residual(self._format, values)

    def inherited_state(self) -> dict[str, NDArray[Any]]:
        """Return the state of an inner optimizer that the last incarnation stored, {} if it stored none. Raises
        CorruptData, WorkerEvicted."""
        if not self._inherited:
            return {}
        with self._there("inner state"):
            data = self._store.load_state(self._inherited)
        return from_bytes(bytes(data), f"the inner state of worker {self._membership.worker!r}") if data else {}

    @contextlib.contextmanager
    def _there(self, what: str) -> Iterator[None]:
        """Raise CorruptData for bytes that are gone, unless a newer incarnation freed them: then WorkerEvicted."""
        try:
            yield
        except ChunkGone as gone:
            self._membership.round_state()
            worker = self._membership.worker
            raise CorruptData(f"the {what} that {worker!r} stored when it left is not there: {gone}") from None

    def hold(self, lacks: str) -> None:
        """Have parameters keep what the format has left out of them, because this contribution `lacks` a gradient of
        them."""
        if self.residual and lacks:
            lacking = (self._layout.parameters[number] for number in sorted(numbers_in(lacks)))
            self.residual.hold([(p.start, p.stop) for p in lacking])

    def keep(self) -> None:
        """Note that the last encoded contribution was accepted: what it left out goes into the next one."""
        if self.residual:
            self.residual.keep()

    def save(self, state: bytes) -> str:
        """Store the residual of all that was accepted, and the `state` of an inner optimizer after it, for the next
        incarnation. Return their name, "" if there is nothing to store or no room."""
        me = self._membership
        if not me.sequence:
            return self._inherited
        if self.residual or state:
            with contextlib.suppress(WorkerEvicted, ServerFull, JobNotFound, DeviceFailed):
                if me.check(me.round_state()).accepted == me.sequence:
                    values = self.residual.values if self.residual else None
                    return self._store.save(me.incarnation, me.sequence, values, state)
        return ""

    def stored_keys(self, name: str) -> list[str]:
        """Return the keys under which `save` stored the residual `name`."""
        return self._store.keys(name) if name else []
