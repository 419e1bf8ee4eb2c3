"""What bytes are trusted by: xxh3 digests of chunks, folded to one a shard. Pure.

xxh3 finds accidents (lost, cut, mixed bytes) at memory speed; it is no defence against forgery.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np
import xxhash

from kvps.arrays.layout import DTYPE, Array, Layout
from kvps.device.base import Flat, PendingArray

Buffers = Sequence[memoryview]
"""Pieces of memory that are one value when laid end to end."""


def digest_of(buffers: Buffers) -> str:
    """xxh3-64 of the pieces laid end to end, 16 hex digits."""
    state = xxhash.xxh3_64()
    for piece in buffers:
        state.update(piece)
    return state.hexdigest()


def fold(digests: Iterable[str]) -> str:
    """One digest of several, in their order."""
    return xxhash.xxh3_64_hexdigest("".join(digests).encode())


def view(array: Array) -> memoryview:
    """The bytes of a contiguous array, without a copy."""
    return array.data.cast("B")


def chunked(layout: Layout, arrays: Sequence[Array]) -> list[list[Buffers]]:
    """For each shard, for each of its chunks: the memory it is made of. `arrays` are flat, in layout order."""
    memory, size = [view(array) for array in arrays], DTYPE.itemsize
    return [
        [[memory[p.number][p.start * size : p.stop * size] for p in pieces] for pieces in chunks]
        for chunks in layout.pieces
    ]


def shard_digests(layout: Layout, flat: Array) -> list[str]:
    """The digest of each shard's part of a flat array (shape (size,), float32), as the commit log has them."""
    return [fold(digest_of([view(flat[c.start : c.stop])]) for c in chunks) for chunks in layout.chunks]


def finite(array: Flat) -> bool:
    """Whether a flat array holds neither NaN nor Inf, looked at in pieces that stay in the cache; on a device whole."""
    step = 1 << 18 if isinstance(array, np.ndarray | PendingArray) else array.size
    return all(bool(np.isfinite(array[i : i + step]).all()) for i in range(0, array.size, step))


def weights_sha256(flat: Array) -> str:
    """sha256 of all parameters' bytes in layout order: what two runs are compared by."""
    return hashlib.sha256(view(flat)).hexdigest()
