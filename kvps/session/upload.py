"""A contribution on its way out: each chunk leaves as soon as all the arrays that it is made of are there.

So a push goes on while later layers' gradients are still being computed, and a digest is taken of bytes that are then
sent out of the same cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from kvps.arrays.digest import Buffers, finite, fold, view
from kvps.arrays.error_feedback import Residual
from kvps.arrays.layout import Array, Layout
from kvps.device.base import Flat
from kvps.transport.base import ChunkUpload


class GradientUpload:
    """One contribution. Arrays are flat, contiguous float32 and must stay as they are until it is accepted; of one that
    still arrives a chunk is waited for when it is its turn.

    finite   False once an array held NaN or Inf, if this `looks` at them on their way: nobody is told then of what left
    counts   False once an array with NaN or Inf was put where such a contribution counts as zeros
    begun    whether anything of it may have left
    """

    def __init__(self, layout: Layout, residual: Residual | None, chunks: ChunkUpload, looks: bool = False) -> None:
        self.chunks = chunks
        self.finite = True
        self.counts = True
        self.begun = False
        self._looks = looks
        self._layout = layout
        self._residual = residual
        self._arrays: list[Flat | None] = [None] * len(layout.parameters)
        self._missing = [[len(pieces) for pieces in chunks] for chunks in layout.pieces]
        self._digests = [[""] * len(chunks) for chunks in layout.pieces]
        self._whole: list[tuple[int, int]] = []  # chunks that wait
        self._first = [0, *accumulate(len(chunks) for chunks in layout.pieces)]  # of a shard, among all chunks

    def has(self, number: int) -> bool:
        """Whether the `number`-th array was put."""
        return self._arrays[number] is not None

    def put(self, arrays: Mapping[int, Flat], last: bool = True) -> None:
        """Add arrays, by their numbers in the layout, and send the chunks that are whole now; those that may not leave
        before all of them can, with the `last` arrays."""
        self._whole += self._completed(arrays)
        if not (last or self.chunks.immediate):
            return
        whole, self._whole = self._whole, []
        for (shard, number), value in zip(whole, self._values(whole), strict=True):
            self.begun = True
            self._digests[shard][number] = self.chunks.send(self._first[shard] + number, value)

    def _completed(self, arrays: Mapping[int, Flat]) -> Iterator[tuple[int, int]]:
        """The chunks of which these are the last arrays that were missing, as (shard, number)."""
        for number, array in arrays.items():
            self._arrays[number] = array
            for shard, chunk in self._layout.chunks_of[number]:
                self._missing[shard][chunk] -= 1
                if not self._missing[shard][chunk]:
                    yield shard, chunk

    def _values(self, chunks: Sequence[tuple[int, int]]) -> Iterator[Buffers]:
        """What is sent of each: in host memory it is computed when it is its turn, to be sent out of the cache."""
        parts = map(self._pieces, chunks)
        if self._residual:
            starts = (self._layout.chunks[shard][number].start for shard, number in chunks)
            return ([data.data] for data in self._residual.encode(zip(starts, parts, strict=True)))
        return ([view(piece) for piece in pieces] for pieces in parts)

    def _pieces(self, chunk: tuple[int, int]) -> list[Array]:
        """The memory it is made of."""
        shard, number = chunk
        pieces = []
        for p in self._layout.pieces[shard][number]:
            array = self._arrays[p.number]
            assert array is not None
            pieces.append(array[p.start : p.stop])
        if self._looks:  # who sends them then takes them out of the cache
            self.finite = self.finite and all(map(finite, pieces))
        return pieces

    @property
    def digests(self) -> str:
        """The digest of each shard's part, as push.lua takes them; of all that was put."""
        return ",".join(fold(chunks) for chunks in self._digests)
