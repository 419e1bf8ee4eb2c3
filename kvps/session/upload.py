"""Sends a contribution: each chunk leaves as soon as all the arrays that it is made of are there.

So chunks are sent while later layers' gradients are still being computed, and each digest is taken just before its
bytes are sent, while they are in the cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from kvps.arrays.digest import Buffers, finite, fold, view
from kvps.arrays.error_feedback import Residual
from kvps.arrays.layout import Array
from kvps.arrays.runs import Runs
from kvps.device.base import CPU, Flat
from kvps.transport.base import ChunkUpload


class Gradients(NamedTuple):
    """The gradients of the parameters with the numbers `first` to `stop` - 1, end to end in one flat array."""

    first: int
    stop: int
    array: Flat


class GradientUpload:
    """The upload of one contribution. Arrays are flat, contiguous float32 and must not change until it is accepted. If
    an array is still arriving from a device, each chunk is waited for when it is sent.

    finite  False once a sent array held NaN or Inf, if `checks_finite`: chunks that have left are not announced
    counts  False once an array with NaN or Inf was put, in a job where such a contribution counts as zeros
    begun   whether any of its bytes may have left
    part    the part of the model whose gradient it is, "" for all of it
    """

    def __init__(
        self, runs: Runs, residual: Residual | None, chunks: ChunkUpload, checks_finite: bool = False, part: str = ""
    ) -> None:
        self.chunks = chunks
        self.part = part
        self.finite = True
        self.counts = True
        self.begun = False
        self._checks_finite = checks_finite
        self._runs = runs
        self._layout = runs.layout
        self._residual = residual
        if residual:
            residual.begin()
        self._added = bytearray(len(runs.of))
        self._lacks = [len(run) for run in runs.numbers]  # parameters that are to be added to each run
        self._gathered: list[list[Gradients]] = [[] for _ in runs.numbers]
        self._missing = [[len(pieces) for pieces in chunks] for chunks in self._layout.pieces]
        self._digests = [[""] * len(chunks) for chunks in self._layout.pieces]
        self._whole: list[tuple[int, int]] = []  # complete chunks that are not sent yet
        self._first = [0, *accumulate(len(chunks) for chunks in self._layout.pieces)]  # number of a shard's first chunk

    def has(self, number: int) -> bool:
        """Return whether the gradient of the `number`-th parameter was added."""
        return bool(self._added[number])

    def add(self, gradients: Iterable[Gradients], last: bool = True) -> None:
        """Add gradients, each within one run, and send the chunks that are now complete. If none may
        leave before all are complete, they leave with the `last` ones."""
        self._whole += self._completed(gradients)
        if not (last or self.chunks.immediate):
            return
        whole, self._whole = self._whole, []
        for (shard, number), value in zip(whole, self._values(whole), strict=True):
            self.begun = True
            self._digests[shard][number] = self.chunks.send(self._first[shard] + number, value)
        if not last:  # the user may write to the arrays again, and the digests must be of the bytes that were sent
            self.chunks.flush()

    def _completed(self, gradients: Iterable[Gradients]) -> Iterator[tuple[int, int]]:
        """Yield the chunks that these gradients complete, as (shard, number)."""
        for gradient in gradients:
            count = gradient.stop - gradient.first
            self._added[gradient.first : gradient.stop] = b"\1" * count
            number = self._runs.of[gradient.first]
            self._gathered[number].append(gradient)
            self._lacks[number] -= count
            if self._lacks[number]:
                continue
            for shard, chunk in self._layout.chunks_of[number]:
                self._missing[shard][chunk] -= 1
                if not self._missing[shard][chunk]:
                    yield shard, chunk

    def _array(self, number: int) -> Flat:
        """Return the array of a whole run."""
        gathered = self._gathered[number]
        if len(gathered) > 1:  # it was added in parts
            arrays = [gradient.array[:] for gradient in sorted(gathered, key=lambda gradient: gradient.first)]
            home = self._residual.home if self._residual else CPU
            run = self._runs.numbers[number]
            gathered[:] = [Gradients(run.start, run.stop, home.xp.concatenate(arrays))]
        return gathered[0].array

    def _values(self, chunks: Sequence[tuple[int, int]]) -> Iterator[Buffers]:
        """Yield the bytes of each chunk. In host memory they are made just before they are sent, out of the cache."""
        parts = map(self._pieces, chunks)
        if self._residual:
            starts = (self._layout.chunks[shard][number].start for shard, number in chunks)
            return ([data.data] for data in self._residual.encode(zip(starts, parts, strict=True)))
        return ([view(piece) for piece in pieces] for pieces in parts)

    def _pieces(self, chunk: tuple[int, int]) -> list[Array]:
        """Return the memory that a chunk is made of."""
        shard, number = chunk
        pieces = []
        for p in self._layout.pieces[shard][number]:
            pieces.append(self._array(p.number)[p.start : p.stop])
        if self._checks_finite:  # the send then reads them from the cache
            self.finite = self.finite and all(map(finite, pieces))
        return pieces

    @property
    def digests(self) -> str:
        """The digest of what each shard has of it, as push.lua takes them, once all arrays were put."""
        return ",".join(
            fold(digest for chunk, digest in zip(chunks, digests, strict=True) if chunk.in_part(self.part))
            for chunks, digests in zip(self._layout.chunks, self._digests, strict=True)
        )
