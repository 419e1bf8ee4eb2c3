"""The lossless difference of two versions of a model's bits: which items changed, and by how much. Pure.

A version is a flat array of 4-byte words. Its *stretches* say how wide the items in them are: a bfloat16 has 2 bytes.
A training step changes few of the 2-byte items, by few units in the last place, so a difference is much shorter than
the words. Bit patterns are subtracted as integers that wrap around: every pair of versions works, NaN and -0 too.

All integers are little-endian. A difference is

    u8 1            the format
    u64             words
    sections        in order, to the end

The sections follow from the stretches. The items of all stretches of one width, in order of their places, are one
sequence; the widths ascend. Each `_SECTION` (1 << 24) items of such a sequence are a section, the last one has fewer:

    u32 items       of this section
    u32 changes     how many of them differ
    gaps            of the listed items, u32, as in `kvps.arrays.planes`
    changes         of the items that differ, of the items' width, as there

The listed items are those that differ; or those that do not, if more than half differ. A gap is how many items lie
between a listed item and the one before it, or the start of the section. A change is (new - old) mod 2^b of items of b
bits, as zigzag: 0, -1, 1, -2, 2 are 0, 1, 2, 3, 4.

If items change independently with probability p, gaps have an entropy of H(p) / p bits (H is that of a coin), which is
as little as any list of places can take; their Huffman code takes up to 2% more. What is left to a better code is that
changes, and gaps, depend on what is beside them.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import ml_dtypes  # noqa: F401  it gives NumPy the names of its dtypes
import numpy as np
import zstandard
from numpy.typing import NDArray

from kvps.arrays.layout import DTYPE, Array, Layout
from kvps.arrays.pieces import Parameter
from kvps.arrays.planes import NumberReader, Reader, compressor, planes_of

Items = NDArray[Any]
"""Bit patterns, as unsigned integers of the items' width."""
Places = NDArray[np.int64]
Range = tuple[int, int]
"""Words `start` to `stop`."""

_FORMAT = 1
_HEADER = struct.Struct("<BQ")
_SECTION_HEADER = struct.Struct("<II")
_SECTION = 1 << 24
_PIECE = 1 << 16  # items or changes handled at a time, so that what lies between the passes stays in the nearest cache
_BITS: dict[int, np.dtype[Any]] = {1: np.dtype("u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}
_GAP = _BITS[4]


class Stretch(NamedTuple):
    """Words `start` to `stop` of an array, whose items have `width` bytes: 1, 2, 4 or 8."""

    start: int
    stop: int
    width: int


def stretches(layout: Layout, shard: int) -> list[Stretch]:
    """Return the stretches of a shard, whose words are counted from the shard's first. Neighbours differ in width.

    The whole model is shard 0 of `layout.of_shards(1)`. Where a shard ends within an item of 8 bytes, that parameter's
    words are items of 4 bytes.
    """
    low, high = layout.shard_range(shard)
    out = list[Stretch]()
    for p in layout.parameters:
        start, stop = max(p.start, low), min(p.stop, high)
        if start >= stop:
            continue
        width = _width(p)
        if width > DTYPE.itemsize and ((start - p.start) % 2 or (stop - start) % 2):
            width = DTYPE.itemsize
        if out and out[-1].width == width:
            out[-1] = out[-1]._replace(stop=stop - low)
        else:
            out.append(Stretch(start - low, stop - low, width))
    return out


def _width(parameter: Parameter) -> int:
    """Return how many bytes an item of the parameter has."""
    return parameter.stored_as.itemsize


def encode(stretches: Sequence[Stretch], old: Array, new: Array) -> bytes | None:
    """Return the difference from `old` to `new`, both (n,) float32; None if it is not shorter than the words.

    The stretches are those of these n words. The same words give the same bytes with one version of zstd.
    """
    out: list[bytes | memoryview] = [_HEADER.pack(_FORMAT, new.size)]
    size, press = _HEADER.size, compressor()
    for bits, ranges in _sections(stretches):
        for piece in _section(bits, *_differences(bits, ranges, old, new), press):
            size += len(piece)
            if size >= new.nbytes:
                return None
            out.append(piece)
    return b"".join(out) if size < new.nbytes else None


def follow(stretches: Sequence[Stretch], sent: bytes | memoryview, words: Array) -> None:
    """Bring `words`, (n,) float32, from the old version to the new one, in place.

    Raises ValueError if `encode` cannot have written `sent` for n words of these stretches; some words may be changed
    then. Bytes that it wrote for others, or that were changed on the way, may give wrong words without an error:
    compare a digest afterwards. Whatever the bytes are, they take at most 6 bytes and an item's width of memory for
    each item of a section, and a few MB.
    """
    reader = Reader(sent)
    if reader.fields(_HEADER) != (_FORMAT, words.size):
        raise ValueError("it is no difference of so many words")
    for bits, ranges in _sections(stretches):
        items = _items(bits, ranges)
        claimed, count = reader.fields(_SECTION_HEADER)
        if claimed != items or count > items:
            raise ValueError("a section has another number of items")
        gaps = NumberReader(reader, min(count, items - count), _GAP)
        changes = NumberReader(reader, count, bits)
        firsts = np.cumsum([0] + [_items(bits, [each]) for each in ranges])
        for places in _changed(gaps, count, items):
            deltas = _from_zigzag(changes.take(places.size))
            cuts = np.searchsorted(places, firsts)
            for number in np.flatnonzero(np.diff(cuts)).tolist():
                low, high = ranges[number]
                cut = slice(cuts[number], cuts[number + 1])
                words[low:high].view(bits)[places[cut] - firsts[number]] += deltas[cut]
    if reader.left:
        raise ValueError("there are bytes after the last section")


def _sections(stretches: Sequence[Stretch]) -> Iterator[tuple[np.dtype[Any], list[Range]]]:
    """Yield for each section the type of its items as bits, and where they lie."""
    of = defaultdict[int, list[Range]](list)
    for start, stop, width in stretches:
        of[width].append((start, stop))
    for width in sorted(of):
        most = _SECTION * width // DTYPE.itemsize
        room, ranges = most, list[Range]()
        for low, high in of[width]:
            while low < high:
                stop = min(high, low + room)
                ranges.append((low, stop))
                room -= stop - low
                low = stop
                if not room:
                    yield _BITS[width], ranges
                    room, ranges = most, []
        if ranges:
            yield _BITS[width], ranges


def _items(bits: np.dtype[Any], ranges: Sequence[Range]) -> int:
    return sum(high - low for low, high in ranges) * DTYPE.itemsize // bits.itemsize


def _differences(
    bits: np.dtype[Any], ranges: Sequence[Range], old: Array, new: Array
) -> tuple[int, NDArray[np.int32], Items]:
    """Return how many items a section has, the places of those that differ, and their changes."""
    start, places, changes, mask = 0, [np.empty(0, np.int32)], [np.empty(0, bits)], np.empty(_PIECE, np.bool_)
    for low, high in ranges:
        before, after = old[low:high].view(bits), new[low:high].view(bits)
        for i in range(0, before.size, _PIECE):
            was, now = before[i : i + _PIECE], after[i : i + _PIECE]
            found = np.flatnonzero(np.not_equal(was, now, out=mask[: was.size]))
            if found.size:
                places.append((found + (start + i)).astype(np.int32))
                changes.append(now[found] - was[found])
        start += before.size
    return start, np.concatenate(places), np.concatenate(changes)


def _section(
    bits: np.dtype[Any], items: int, places: NDArray[Any], changes: Items, press: zstandard.ZstdCompressor
) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a section in pieces, of what `_differences` returned of it."""
    yield _SECTION_HEADER.pack(items, places.size)
    if 2 * places.size > items:
        same = np.ones(items, np.bool_)
        same[places] = False
        places = np.flatnonzero(same)
    gaps = np.diff(places, prepend=places.dtype.type(-1)) - 1
    yield from planes_of(gaps.astype(_GAP), press)
    yield from planes_of(_zigzag(changes), press)


def _zigzag(changes: Items) -> Items:
    signed = changes.view(f"<i{changes.itemsize}")
    folded = (signed << 1) ^ (signed >> (8 * changes.itemsize - 1))
    return folded.view(changes.dtype)


def _from_zigzag(folded: Items) -> Items:
    changes: Items = (folded >> 1) ^ np.negative(folded & 1)
    return changes


def _changed(gaps: NumberReader, changes: int, items: int) -> Iterator[Places]:
    """Yield the places of the items that differ, ascending, some at a time. Raises ValueError for one that is none."""
    if gaps.count == changes:
        yield from _places(gaps, items)
        return
    differ = np.ones(items, np.bool_)
    for places in _places(gaps, items):
        differ[places] = False
    for i in range(0, items, _PIECE):
        yield np.flatnonzero(differ[i : i + _PIECE]) + i


def _places(gaps: NumberReader, items: int) -> Iterator[Places]:
    last = -1
    for i in range(0, gaps.count, _PIECE):
        places = np.cumsum(gaps.take(min(_PIECE, gaps.count - i)), dtype=np.int64)
        places += np.arange(last + 1, last + 1 + places.size)
        last = int(places[-1])
        if last >= items:
            raise ValueError("an item lies beyond the last")
        yield places
