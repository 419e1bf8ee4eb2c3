"""Whole contributions as they are on the wire: each chunk in the job's format. Pure."""

from __future__ import annotations

from itertools import chain

import numpy as np

from kvps.arrays.digest import digest_of, fold
from kvps.arrays.error_feedback import Residual
from kvps.arrays.formats import Bytes, Format
from kvps.arrays.layout import DTYPE, Array, Layout


class Coding:
    """The coding of a contribution in one buffer: encoded chunks end to end, in the order of the layout. `part` is the
    part of the model that it has, "" for all of it."""

    def __init__(self, layout: Layout, format: Format, part: str = "") -> None:
        self._layout = layout
        self._format = format
        self._part = part
        self._chunks = [[chunk for chunk in shard if chunk.in_part(part)] for shard in layout.chunks]

    def encode(self, values: Array, residual: Residual | None) -> Bytes:
        """Return the bytes of `values`, (size,) float32. A lossy format adds `residual` to them, and updates it."""
        chunks = list(chain.from_iterable(self._chunks))
        if residual is None:
            return (np.concatenate([values[c.start : c.stop] for c in chunks]) if self._part else values).view(np.uint8)
        data = np.concatenate(list(residual.encode((c.start, [values[c.start : c.stop]]) for c in chunks)))
        residual.keep()
        return data

    def decode(self, data: Bytes) -> Array:
        """Return the values, (size,) float32, zeros for other parts; for fp32 and the whole model the same memory.
        Raises ValueError if no encoder wrote it."""
        if not self._format.lossy and not self._part:
            return data.view(DTYPE)
        values: Array = np.zeros(self._layout.size, DTYPE)
        start = 0
        for chunk in chain.from_iterable(self._chunks):
            nbytes = self._format.nbytes(chunk.stop - chunk.start)
            self._format.decode(data[start : start + nbytes], values[chunk.start : chunk.stop])
            start += nbytes
        return values

    def nbytes(self, shard: int) -> int:
        """Return how many bytes a shard's part takes."""
        return sum(self._format.nbytes(chunk.stop - chunk.start) for chunk in self._chunks[shard])

    def digests(self, data: Bytes) -> list[str]:
        """Return the digest of each shard's part, as the commit log has them."""
        start, digests = 0, []
        for shard in self._chunks:
            chunks = []
            for chunk in shard:
                nbytes = self._format.nbytes(chunk.stop - chunk.start)
                chunks.append(digest_of([data[start : start + nbytes].data]))
                start += nbytes
            digests.append(fold(chunks))
        return digests
