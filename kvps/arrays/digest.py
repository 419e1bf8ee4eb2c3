"""The digests that bytes are checked against: xxh3 of each chunk, folded into one digest per shard. Pure.

xxh3 finds accidents (lost, cut, mixed bytes) at memory speed; it is no defence against forgery.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence

import numpy as np
import xxhash

from kvps.arrays.layout import DTYPE, Array, Layout
from kvps.device.base import Flat, PendingArray

_CACHED_ITEMS = 1 << 18

Buffers = Sequence[memoryview]
"""Pieces of memory that are one value when laid end to end."""


def digest_of(buffers: Buffers) -> str:
    """Return the xxh3-64 of the pieces laid end to end, as 16 hex digits."""
    state = xxhash.xxh3_64()
    for piece in buffers:
        state.update(piece)
    return state.hexdigest()


def fold(digests: Iterable[str]) -> str:
    """Return one digest of several, in their order."""
    return xxhash.xxh3_64_hexdigest("".join(digests).encode())


def view(array: Array) -> memoryview:
    """Return the bytes of a contiguous array, without a copy."""
    return array.data.cast("B") if array.size else memoryview(b"")  # a view with a zero in its shape has no cast


def chunked(layout: Layout, arrays: Sequence[Array]) -> list[list[Buffers]]:
    """Return for each chunk of each shard the memory that makes it up. `arrays` are flat, in layout order."""
    memory, size = [view(array) for array in arrays], DTYPE.itemsize
    return [
        [[memory[p.number][p.start * size : p.stop * size] for p in pieces] for pieces in chunks]
        for chunks in layout.pieces
    ]


def chunked_flat(layout: Layout, flat: Array) -> list[list[Buffers]]:
    """Return what `chunked` does, of all arrays in one, (layout.size,)."""
    return [[[view(flat[c.start : c.stop])] for c in chunks] for chunks in layout.chunks]


def shard_digests(layout: Layout, flat: Array) -> list[str]:
    """Return the digest of each shard's part of a flat array (shape (size,), float32), as in the commit log."""
    return [fold(digest_of([view(flat[c.start : c.stop])]) for c in chunks) for chunks in layout.chunks]


def finite(array: Flat) -> bool:
    """Return whether a flat array has no NaN or Inf. Reads pieces that fit the cache, or on a device all at once."""
    if isinstance(array, np.ndarray) and math.isfinite(_square_sum(array)):
        return True  # in two thirds of the time; the sum of very large items is Inf too
    step = _CACHED_ITEMS if isinstance(array, np.ndarray | PendingArray) else max(1, array.size)
    return all(bool(np.isfinite(array[i : i + step]).all()) for i in range(0, array.size, step))


def finite_square_sum(array: Flat) -> float:
    """Return the sum of the squares of a flat array, to the precision of float32.

    It is NaN if an item is not finite, and Inf if finite items have too large a sum.
    """
    total = _square_sum(array) if isinstance(array, np.ndarray) else float((array * array).sum())
    return math.nan if math.isinf(total) and not finite(array) else total


def _square_sum(array: Array) -> float:
    total = 0.0
    with np.errstate(all="ignore"):
        for start in range(0, array.size, _CACHED_ITEMS):
            piece = array[start : start + _CACHED_ITEMS]
            total += float(np.dot(piece, piece))
    return total


def weights_sha256(flat: Array) -> str:
    """Return the sha256 of all parameters' bytes in layout order, by which two runs are compared."""
    return hashlib.sha256(view(flat)).hexdigest()
