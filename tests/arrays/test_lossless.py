"""Lossless differences: they bring any bits to any others, are as short as their entropy allows, and bytes that nobody
wrote do no harm."""

from __future__ import annotations

import struct
import tracemalloc
from contextlib import suppress
from functools import cache

import ml_dtypes
import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from kvps.arrays.layout import Layout, Parameter
from kvps.arrays.lossless import Stretch, encode, follow, stretches

WIDTHS = (1, 2, 4, 8)
REACHES = (1, 3, 40, 1 << 10, 1 << 63)
"""How far changes go, in units of the last place."""


def bits(width: int) -> np.dtype:
    return np.dtype(f"<u{width}")


def changed(words: np.ndarray, parts: list[Stretch], share: float, reach: int, seed: int) -> np.ndarray:
    """Return the words after about a share of the items changed."""
    rng, out = np.random.default_rng(seed), words.copy()
    for start, stop, width in parts:
        items = out[start:stop].view(bits(width))
        by = rng.integers(-reach, reach, items.size, np.int64, endpoint=reach < 1 << 63)
        items += np.where(rng.random(items.size) < share, by, 0).astype(bits(width))
    return out


def random_words(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1 << 32, size, np.uint32).view(np.float32)


def followed(parts: list[Stretch], old: np.ndarray, sent: bytes | None) -> np.ndarray:
    assert sent is not None
    out = old.copy()
    follow(parts, sent, out)
    return out


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return bool(np.array_equal(a.view(np.uint32), b.view(np.uint32)))


def one(words: np.ndarray, width: int) -> list[Stretch]:
    return [Stretch(0, words.size, width)]


@st.composite
def pairs(draw: st.DrawFn) -> tuple[list[Stretch], np.ndarray, np.ndarray]:
    parts, start = list[Stretch](), 0
    for width in draw(st.lists(st.sampled_from(WIDTHS), max_size=6)):
        stop = start + draw(st.integers(1, 2000)) * max(1, width // 4)
        parts.append(Stretch(start, stop, width))
        start = stop
    old = random_words(start, draw(st.integers(0, 99)))
    share = draw(st.sampled_from([0, 0.001, 0.03, 0.3, 0.5, 0.97, 1]))
    return parts, old, changed(old, parts, share, draw(st.sampled_from(REACHES)), draw(st.integers(0, 99)))


@settings(max_examples=150)
@given(pairs())
def test_any_bits_come_to_any_others_or_there_is_no_shorter_difference(
    pair: tuple[list[Stretch], np.ndarray, np.ndarray],
) -> None:
    parts, old, new = pair
    sent = encode(parts, old, new)
    assert sent == encode(parts, old, new)
    if sent is not None:
        assert len(sent) < new.nbytes
        assert same(followed(parts, old, sent), new)
        assert same(by_definition(parts, old, sent), new)


def by_definition(parts: list[Stretch], old: np.ndarray, sent: bytes) -> np.ndarray:
    """Follow a difference of one section for each width as the docstrings say, item by item."""
    out, at = old.copy(), struct.calcsize("<BQ")
    assert struct.unpack("<BQ", sent[:at]) == (1, old.size)

    def integers(count: int) -> tuple[int, ...]:
        nonlocal at
        at += 4 * count
        return struct.unpack(f"<{count}I", sent[at - 4 * count : at])

    def plane(size: int) -> bytes:
        nonlocal at
        if not size:
            return b""
        (stored,) = integers(1)
        at += stored
        data = sent[at - stored : at]
        return data if stored == size else zstandard.decompress(data)

    def numbers(count: int, width: int) -> list[int]:
        from15, from255 = integers(2)
        pairs = plane((count + 1) // 2) if from15 < count else b""
        first = [half for pair in pairs for half in (pair & 15, pair >> 4)][:count] if pairs else [15] * count
        second = iter(plane(from15) if from255 < from15 else b"\xff" * from15)
        whole = map(bytes, zip(*(plane(from255) for _ in range(width)), strict=True))
        rest = (n if n < 255 else int.from_bytes(next(whole), "little") for n in second)
        return [n if n < 15 else next(rest) for n in first]

    for width in sorted({part.width for part in parts}):
        places = [
            (part, i) for part in parts if part.width == width for i in range((part.stop - part.start) * 4 // width)
        ]
        items, count = integers(2)
        assert items == len(places)
        listed, last = set[int](), -1
        for gap in numbers(min(count, items - count), 4):
            last += gap + 1
            listed.add(last)
        differ = [i for i in range(items) if (i in listed) == (2 * count <= items)]
        for where, folded in zip(differ, numbers(count, width), strict=True):
            part, i = places[where]
            view = out[part.start : part.stop].view(bits(width))
            change = -(folded + 1) // 2 if folded % 2 else folded // 2
            view[i] = (int(view[i]) + change) % (1 << 8 * width)
    assert at == len(sent)
    return out


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("words", [0, 1])
def test_what_is_too_small_has_no_difference(words: int, width: int) -> None:
    old = random_words(words)
    assert encode(one(old, width) if words else [], old, old) is None


@pytest.mark.parametrize("width", WIDTHS)
def test_bits_that_have_nothing_in_common_have_no_difference(width: int) -> None:
    old = random_words(5000)
    assert encode(one(old, width), old, random_words(5000, 1)) is None


@pytest.mark.parametrize("width", WIDTHS)
def test_no_change_all_changed_a_run_and_the_last_item_take_few_bytes(width: int) -> None:
    items = 300_003 if width < 8 else 300_002
    old = random_words(items * width // 4 if width > 4 else items)
    count = old.nbytes // width
    for where in (slice(0), slice(None), slice(count // 3, count // 2), slice(count - 1, None), slice(1)):
        new = old.copy()
        new.view(bits(width))[where] += bits(width).type(1)
        sent = encode(one(old, width), old, new)
        assert same(followed(one(old, width), old, sent), new)
        assert len(sent or b"") < 400


def test_items_of_several_sections_and_stretches() -> None:
    size = 5 << 20
    parts = [Stretch(0, size // 2, 1), Stretch(size // 2, size // 2 + 5, 4), Stretch(size // 2 + 5, size, 1)]
    old = random_words(size)
    new = changed(old, parts, 0.01, 3, 1)
    assert same(followed(parts, old, encode(parts, old, new)), new)


@cache
def drawn(items: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return masters, a gradient, and a number from 0 to 1 for each row."""
    rng = np.random.default_rng(7)
    master = rng.standard_normal(items, np.float32) * np.float32(0.02)
    return master, rng.standard_normal(items, np.float32), rng.random(items >> 10)


def trained(items: int, lr: float, quiet: float = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return the bfloat16 bits of float32 masters before and after a step like AdamW's.

    In a part of the rows, `quiet`, steps are small: what changes lies in clusters then.
    """
    master, gradient, rows = drawn(items)
    step = np.sign(gradient) * np.float32(0.6) + gradient * np.float32(0.4)
    step *= np.where(np.repeat(rows < quiet, 1 << 10), np.float32(0.05), np.float32(1))
    after = master - np.float32(lr) * (step + np.float32(0.01) * master)
    old, new = (each.astype(ml_dtypes.bfloat16).view(np.uint16) for each in (master, after))
    return old, new


def entropy(counts: np.ndarray) -> float:
    """Return the bits of as many symbols as were counted."""
    return float(-(counts * np.log2(counts / counts.sum())).sum())


@pytest.mark.parametrize("quiet", [0, 0.8])
@pytest.mark.parametrize(
    ("lr", "share"),
    [(1.7e-8, 0.001), (2e-7, 0.01), (7.4e-7, 0.03), (3.2e-6, 0.1), (1.4e-5, 0.3), (4e-5, 0.6), (1e-4, 0.84)],
)
def test_a_difference_is_as_short_as_the_entropy_of_independent_changes(lr: float, share: float, quiet: float) -> None:
    old, new = trained(1 << 21, lr / (1 - quiet), quiet)
    differ = old != new
    count = int(np.count_nonzero(differ))
    assert quiet or count / old.size == pytest.approx(share, rel=0.15)
    least = entropy(np.array([count, old.size - count]))
    least += entropy(np.unique((new - old)[differ], return_counts=True)[1])
    sent = encode([Stretch(0, old.size // 2, 2)], old.view(np.float32), new.view(np.float32))
    assert 8 * len(sent or b"") <= 1.15 * least


def test_what_was_not_written_for_these_words_is_refused() -> None:
    old = random_words(1000)
    sent = encode(one(old, 2), old, changed(old, one(old, 2), 0.1, 3, 1))
    assert sent is not None
    for parts, data, size in (
        (one(old, 2), b"", 1000),
        (one(old, 2), sent + b"\0", 1000),
        (one(old, 2), b"\2" + sent[1:], 1000),
        (one(old, 2), sent, 999),
        (one(old, 4), sent, 1000),
        ([*one(old, 2), Stretch(0, 1, 1)], sent, 1000),
    ):
        with pytest.raises(ValueError, match=r"\w"):
            follow(parts, data, random_words(size))


@pytest.mark.parametrize("claim", [0, 49_999, 50_001, 1 << 28])
@pytest.mark.parametrize("said", [True, False])
def test_a_frame_of_another_size_is_refused_before_there_is_room_for_it(claim: int, said: bool) -> None:
    """The plane of 100,000 gaps that are all below 15 has 50,000 bytes."""
    words = random_words(100_000)
    frame = zstandard.ZstdCompressor(write_content_size=said).compress(bytes(claim))
    assert len(frame) < 50_000
    sent = struct.pack("<BQ5I", 1, words.size, 200_000, 100_000, 1, 1, len(frame)) + frame + bytes(1_000_000)
    with pytest.raises(ValueError, match="a plane has not the size of its numbers"):
        follow(one(words, 2), sent, words)
    assert peak_of(sent, words) < 100_000


@pytest.mark.parametrize("count", [1, 1999])
@pytest.mark.parametrize(("gap", "fits"), [(1999, True), (2000, False), ((1 << 32) - 1, False)])
def test_a_place_beyond_the_last_item_is_refused(count: int, gap: int, fits: bool) -> None:
    """Of 2,000 items one is listed: the only one that differs, or the only one that does not."""
    planes = b"".join(struct.pack("<IB", 1, byte) for byte in gap.to_bytes(4, "little"))
    changes = struct.pack("<I", count) + b"\2" * count + struct.pack("<I", count) + bytes(count)  # all are 1
    sent = struct.pack("<BQ4I", 1, 1000, 2000, count, 1, 1) + planes + struct.pack("<II", count, count) + changes
    words = np.zeros(1000, np.float32)
    if fits:
        follow(one(words, 2), sent, words)
        assert words.view(np.uint16).tolist() == [count > 1] * 1999 + [count == 1]
    else:
        with pytest.raises(ValueError, match="beyond the last"):
            follow(one(words, 2), sent, words)


def peak_of(sent: bytes, words: np.ndarray) -> int:
    """Return how many bytes NumPy and Python took at most while these bytes were followed, or refused."""
    tracemalloc.start()
    try:
        with suppress(ValueError):
            follow(one(words, 2), sent, words)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([0.01, 0.3, 0.9]),
    st.sampled_from(REACHES[:4]),
    st.integers(0, 1 << 20),
    st.binary(min_size=0, max_size=8),
    st.booleans(),
)
def test_mutated_and_cut_bytes_give_an_error_or_other_words(
    share: float, reach: int, where: int, put: bytes, cut: bool
) -> None:
    old = random_words(4000)
    sent = encode(one(old, 2), old, changed(old, one(old, 2), share, reach, 1))
    assert sent is not None
    at = where % min(len(sent), 64) if where % 2 else where % len(sent)  # headers are at the front
    mutated = sent[:at] + put + (b"" if cut else sent[at + len(put) :])
    assert peak_of(mutated, old.copy()) < 20 * old.nbytes
    if cut and len(mutated) < len(sent):
        with pytest.raises(ValueError, match=r"\w"):
            follow(one(old, 2), mutated, old.copy())


def half(name: str, words: int, start: int) -> Parameter:
    return Parameter(name, (2 * words,), start, dtype="bfloat16")


def long(name: str, words: int, start: int) -> Parameter:
    return Parameter(name, (words // 2,), start, dtype="int64")


def test_stretches_are_those_of_the_shard_with_neighbours_of_a_width_as_one() -> None:
    parameters = (
        half("a", 5, 0),
        half("b", 3, 5),
        Parameter("none", (0,), 8),
        Parameter("c", (2,), 8),
        long("d", 8, 10),
        half("e", 3, 18),
    )
    whole = Layout(parameters, 1)
    assert stretches(whole, 0) == [(0, 8, 2), (8, 10, 4), (10, 18, 8), (18, 21, 2)]
    cut = Layout(parameters, 3)
    assert [cut.shard_range(shard) for shard in range(3)] == [(0, 7), (7, 14), (14, 21)]
    assert [stretches(cut, shard) for shard in range(3)] == [
        [(0, 7, 2)],
        [(0, 1, 2), (1, 3, 4), (3, 7, 8)],
        [(0, 4, 8), (4, 7, 2)],
    ]
    odd = Layout((half("a", 3, 0), long("d", 8, 3)), 2)
    assert [stretches(odd, shard) for shard in range(2)] == [[(0, 3, 2), (3, 5, 8)], [(0, 6, 8)]]
    assert stretches(Layout((long("d", 6, 0),), 2), 1) == [(0, 3, 4)]
