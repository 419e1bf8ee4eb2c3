"""Error feedback: what a lossy format leaves out of a worker's gradient is added to its next one, chunk by chunk.

`kvps verify` computes the residuals again and must get the same, so what is computed on a device is bit for bit what is
computed in host memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from kvps.arrays.digest import finite
from kvps.arrays.formats import Bytes, Format, chunk_sizes, encoded, leave_out
from kvps.arrays.layout import CHUNK_BYTES, CHUNK_ITEMS, Array, Layout
from kvps.device.base import CPU, Cuda, Device, PinnedStaging

_MOST = np.finfo(np.float32).max

Parts = Iterable[tuple[int, Sequence[Any]]]
"""For each chunk, the item of the flat buffer at which it begins and the flat arrays that it is made of."""


class Residual:
    """The residual of a worker, in host memory. It begins with `values`, (size,) float32, and owns them from then on.

    home   the device of the residual, on which arrays must be when they are encoded
    """

    home: Device = CPU

    def __init__(self, format: Format, values: Array) -> None:
        self._format = format
        self._values = values
        self._next: Array = np.empty_like(values)
        self._encoded: dict[int, int] = {}  # where encoded chunks begin and end
        self._held: Sequence[tuple[int, int]] = ()
        self._scratch: Array = np.empty(min(values.size, CHUNK_ITEMS), np.float32)

    @property
    def values(self) -> Array:
        """The residual in host memory, (size,) float32; only to be read."""
        return self._values

    def begin(self) -> None:
        """Begin a contribution: forget what was encoded and not kept."""
        self._encoded.clear()
        self._held = ()

    def hold(self, stretches: Sequence[tuple[int, int]]) -> None:
        """Leave items out of this contribution, from the first to the last but one of each stretch: they are encoded as
        zeros, and keep their residual for one that has a gradient of them."""
        self._held = stretches

    def encode(self, chunks: Parts) -> Iterator[Bytes]:
        """Yield the bytes of each chunk. What they leave out counts only after `keep`; until then, encoding them again
        gives the same bytes.

        Use the bytes before the next contribution is encoded: it may overwrite them.
        """
        for start, pieces in chunks:
            yield self._encode(start, pieces)

    def _summed(self, xp: Any, start: int, pieces: Sequence[Any]) -> tuple[Any, list[slice]]:
        """Return the sum of a chunk and its residual, which is made in `_next`, and which items are held: these are
        zeros until `_give_back`."""
        stop = start
        for piece in pieces:
            xp.add(self._values[stop : stop + piece.size], piece, out=self._next[stop : stop + piece.size])
            stop += piece.size
        self._encoded[start] = stop
        held = [slice(max(low, start), min(high, stop)) for low, high in self._held if low < stop and start < high]
        for items in held:
            self._next[items].fill(0)
        return self._next[start:stop], held

    def _give_back(self, xp: Any, held: Iterable[slice]) -> None:
        for items in held:
            xp.copyto(self._next[items], self._values[items])

    def _encode(self, start: int, pieces: Sequence[Array]) -> Bytes:
        with np.errstate(over="ignore"):
            values, held = self._summed(np, start, pieces)
        if not finite(values):  # else an infinite residual would stay so for ever
            np.clip(values, -_MOST, _MOST, out=values)
        data = encoded(self._format, values)
        leave_out(self._format, values, data, self._scratch[: values.size])
        self._give_back(np, held)
        return data

    def keep(self) -> None:
        """Accept what was encoded since `begin`: what it left out is the residual of these chunks from now on."""
        end = 0  # of what is encoded or copied so far
        for start, stop in [*sorted(self._encoded.items()), (self._values.size, 0)]:
            if end < start:
                self._next[end:start] = self._values[end:start]
            end = stop
        self._values, self._next = self._next, self._values
        self._encoded.clear()


class DeviceResidual(Residual):
    """A residual on a CUDA device, `home`: only encoded bytes are copied to host memory."""

    home: Cuda

    def __init__(self, format: Format, values: Array, layout: Layout, home: Cuda) -> None:
        self.home = home
        self._format = format
        self._encoded = {}
        self._held = ()
        self._stream = home.stream()
        # Allocated on this stream, so that CuPy reuses the memory for nothing else while the stream computes there.
        with home.computing_on(self._stream):
            self._values, self._next = home.upload(values), home.upload(values)
        sizes = chunk_sizes(layout, format)
        starts = (chunk.start for chunk in layout.chunks_in(""))
        self._places = dict(zip(starts, accumulate(sizes, initial=0), strict=False))
        self._staging = PinnedStaging(sum(sizes), CHUNK_BYTES, np.uint8)

    @property
    def values(self) -> Array:
        out = np.empty(self._values.shape, np.float32)
        with self.home.computing_on(self._stream):
            self.home.download(self._values, out)
        return out

    def keep(self) -> None:
        with self.home.computing_on(self._stream):
            super().keep()

    def encode(self, chunks: Parts) -> Iterator[Bytes]:
        """Begin all chunks before the first is awaited: one is copied to host memory while the next is computed."""
        with self.home.computing_on(self._stream):
            coming = [self._begun(start, pieces) for start, pieces in chunks]
        for each in coming:
            yield each[:]

    def _begun(self, start: int, pieces: Sequence[Any]) -> Any:
        xp = self.home.exact
        values, held = self._summed(xp, start, pieces)
        xp.clip(values, -_MOST, _MOST, out=values)
        data, decoded = self._format.encode_with(xp, values)
        xp.subtract(values, decoded, out=values)
        self._give_back(xp, held)
        return self._staging.bring(data, self._places[start])
