"""Contributions as they are on the wire: each chunk in the job's format, and what a lossy one leaves out. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvps.formats import Bytes, Format, encoded, leave_out
from kvps.layout import CHUNK_ITEMS, DTYPE, Array, Layout
from kvps.wire import digest, finite, fold

_MOST = np.finfo(np.float32).max


class Remainder:
    """What a lossy format has left out of a worker's gradients so far, (size,) float32: it goes with the next one."""

    def __init__(self, layout: Layout, format: Format) -> None:
        self.values: Array = np.zeros(layout.size, DTYPE)
        self._next: Array = np.empty(layout.size, DTYPE)
        self._format = format
        self._scratch: Array = np.empty(min(layout.size, CHUNK_ITEMS), DTYPE)

    def encode(self, start: int, pieces: Sequence[Array]) -> Bytes:
        """The bytes of a chunk that begins at item `start` and is made of `pieces`; what they leave out is kept."""
        stop = start
        with np.errstate(over="ignore"):
            for piece in pieces:
                np.add(self.values[stop : stop + piece.size], piece, out=self._next[stop : stop + piece.size])
                stop += piece.size
        values = self._next[start:stop]
        if not finite(values):  # else what was infinite once would be so for ever
            np.clip(values, -_MOST, _MOST, out=values)
        data = encoded(self._format, values)
        leave_out(self._format, values, data, self._scratch[: values.size])
        return data

    def keep(self) -> None:
        """What was encoded, all chunks of it, counts: go on from what it left out."""
        self.values, self._next = self._next, self.values


class Coding:
    """A whole contribution in one buffer: its encoded chunks end to end, in the order of the layout."""

    def __init__(self, layout: Layout, format: Format) -> None:
        self._layout = layout
        self._format = format

    def encode(self, values: Array, remainder: Remainder | None) -> Bytes:
        """The bytes of `values`, (size,) float32. `remainder`, for a lossy format, goes with them."""
        if remainder is None:
            return values.view(np.uint8)
        chunks = [chunk for shard in self._layout.chunks for chunk in shard]
        data = np.concatenate([remainder.encode(c.start, [values[c.start : c.stop]]) for c in chunks])
        remainder.keep()
        return data

    def decode(self, data: Bytes) -> Array:
        """The values, (size,) float32; of fp32 the same memory. Raises ValueError for what no encoder wrote."""
        if not self._format.lossy:
            return data.view(DTYPE)
        values: Array = np.empty(self._layout.size, DTYPE)
        at = 0
        for chunk in (chunk for shard in self._layout.chunks for chunk in shard):
            nbytes = self._format.nbytes(chunk.stop - chunk.start)
            self._format.decode(data[at : at + nbytes], values[chunk.start : chunk.stop])
            at += nbytes
        return values

    def nbytes(self, shard: int) -> int:
        """How many bytes a shard's part takes."""
        return sum(self._format.nbytes(chunk.stop - chunk.start) for chunk in self._layout.chunks[shard])

    def digests(self, data: Bytes) -> list[str]:
        """The digest of each shard's part, as the commit log has them."""
        at, out = 0, []
        for shard in self._layout.chunks:
            chunks = []
            for chunk in shard:
                nbytes = self._format.nbytes(chunk.stop - chunk.start)
                chunks.append(digest([data[at : at + nbytes].data]))
                at += nbytes
            out.append(fold(chunks))
        return out
