"""Sequences of integers, most of them small, in planes of bytes that zstd makes shorter. Pure.

All integers are little-endian. As many unsigned integers as were announced, of 1, 2, 4 or 8 bytes, are

    u32 from15      how many go on after the first plane: those of at least 15; or all, and there is no such plane
    u32 from255     how many of these go on after the second plane: those of at least 255; or all, and there is none
    plane           min(number, 15) of all numbers, two in a byte, the first one in the lower half
    plane           min(number, 255) of the numbers that go on, one in a byte
    planes          the numbers that go on after that, whole: the lowest byte of each, then the next bytes, to the last

A plane of no bytes is left out. Any other plane is an u32, how many bytes follow, and these: the plane itself if there
are as many as it has, or else one zstd frame of it.

zstd finds next to no repeats in such planes, and is used for its Huffman code (RFC 8878, 4.2). A Huffman code spends at
least one bit a symbol, so small numbers share a symbol. That keeps what it spends within a few percent of the entropy.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Numbers = NDArray[Any]
"""Unsigned integers of 1, 2, 4 or 8 bytes."""

_COUNTS = struct.Struct("<II")
_PLANE = struct.Struct("<I")
_PAIRED, _SINGLE = 15, 255
_WINDOW_LOG = 17
_MOST = 4
"""A plane pays unless more than one number of so many goes on after it."""


def compressor() -> zstandard.ZstdCompressor:
    """Return a compressor of planes, for one thread. One version of zstd gives the same bytes each time."""
    parameters = zstandard.ZstdCompressionParameters(
        # A tiny table of long matches: chance repeats among few symbols take more bits than their Huffman code.
        window_log=_WINDOW_LOG,
        hash_log=6,
        chain_log=6,
        search_log=1,
        min_match=7,
        target_length=0,
        strategy=zstandard.STRATEGY_FAST,
    )
    return zstandard.ZstdCompressor(compression_params=parameters)


def planes_of(numbers: Numbers, press: zstandard.ZstdCompressor) -> Iterator[bytes | memoryview]:
    """Yield the bytes of (n,) numbers in pieces."""
    planes, counts, rest = list[Bytes](), list[int](), numbers
    for level in (_PAIRED, _SINGLE):
        on = rest >= level
        if _MOST * int(np.count_nonzero(on)) < rest.size:
            plane = np.minimum(rest, level).astype(np.uint8)
            planes.append(_in_pairs(plane) if level == _PAIRED else plane)
            rest = rest[on]
        counts.append(rest.size)
    if rest.size:
        planes += map(np.ascontiguousarray, rest.view(np.uint8).reshape(rest.size, -1).T)
    yield _COUNTS.pack(*counts)
    for each in planes:
        pressed = press.compress(each.data)
        yield _PLANE.pack(min(len(pressed), each.size))
        yield pressed if len(pressed) < each.size else each.data


def _in_pairs(plane: Bytes) -> Bytes:
    out = plane[::2].copy()
    out[: plane.size // 2] |= plane[1::2] << 4
    return out


class Reader:
    """Bytes from front to back. All methods raise ValueError for what is not there."""

    def __init__(self, data: bytes | memoryview) -> None:
        self._left = memoryview(data)
        self._unpress = zstandard.ZstdDecompressor(max_window_size=1 << _WINDOW_LOG)

    @property
    def left(self) -> int:
        """How many bytes have not been read."""
        return len(self._left)

    def fields(self, form: struct.Struct) -> tuple[int, ...]:
        """Return the integers of a header."""
        return form.unpack(self._take(form.size))

    def plane(self, size: int) -> Bytes:
        """Return a plane of so many bytes, read-only."""
        if not size:
            return np.empty(0, np.uint8)
        data = self._take(self.fields(_PLANE)[0])
        if len(data) > size:
            raise ValueError("a plane is longer than its numbers")
        if len(data) < size:
            data = self._unpressed(data, size)
        return np.frombuffer(data, np.uint8)

    def _unpressed(self, frame: memoryview, size: int) -> memoryview:
        try:  # zstandard takes as much memory as a frame claims, so that is looked at first
            if zstandard.frame_content_size(frame) != size:
                raise ValueError("a plane has not the size of its numbers")
            data = memoryview(self._unpress.decompress(frame))
        except zstandard.ZstdError as error:
            raise ValueError(f"a plane is no zstd frame: {error}") from error
        if len(data) != size:
            raise ValueError("a plane ends too early")
        return data

    def _take(self, size: int) -> memoryview:
        if size > len(self._left):
            raise ValueError("it ends too early")
        taken, self._left = self._left[:size], self._left[size:]
        return taken


class NumberReader:
    """The numbers that `planes_of` wrote, some at a time.

    The planes of `count` numbers of `bits` (their dtype) are read at once: up to `bits.itemsize` + 1.5 bytes a number.
    """

    def __init__(self, reader: Reader, count: int, bits: np.dtype[Any]) -> None:
        self.count, self._bits = count, bits
        from15, from255 = reader.fields(_COUNTS)
        if not from255 <= from15 <= count:
            raise ValueError("more numbers go on after a plane than came to it")
        self._pairs = reader.plane((count + 1) // 2) if from15 < count else None
        self._singles = reader.plane(from15) if from255 < from15 else None
        self._whole = [reader.plane(from255) for _ in range(bits.itemsize)]
        self._paired, self._single, self._next = 0, 0, 0  # how many were taken from each

    def take(self, count: int) -> Numbers:
        """Return the next (count,) numbers. Raises ValueError if there are fewer."""
        if self._pairs is None:
            return self._from_15(count)
        low, self._paired = self._paired, self._paired + count
        pairs = self._pairs[low // 2 : (low + count + 1) // 2]
        halves = np.empty((pairs.size, 2), np.uint8)
        np.bitwise_and(pairs, 15, out=halves[:, 0])
        np.right_shift(pairs, 4, out=halves[:, 1])
        out = halves.reshape(-1)[low % 2 : low % 2 + count].astype(self._bits)
        if (on := np.flatnonzero(out == _PAIRED)).size:
            out[on] = self._from_15(on.size)
        return _all(out, count)

    def _from_15(self, count: int) -> Numbers:
        if self._singles is None:
            return self._from_255(count)
        low, self._single = self._single, self._single + count
        out = self._singles[low : low + count].astype(self._bits)
        if (on := np.flatnonzero(out == _SINGLE)).size:
            out[on] = self._from_255(on.size)
        return _all(out, count)

    def _from_255(self, count: int) -> Numbers:
        low, self._next = self._next, self._next + count
        out = np.stack([plane[low : low + count] for plane in self._whole], axis=1)
        return _all(out.view(self._bits).reshape(-1), count)


def _all(numbers: Numbers, count: int) -> Numbers:
    if numbers.size != count:
        raise ValueError("a plane has too few numbers")
    return numbers
