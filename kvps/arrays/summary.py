"""A few numbers that say what an array holds, for people. Pure; sums are in float64."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from kvps.arrays.layout import CHUNK_ITEMS, Array

BINS = 16


class Summary(NamedTuple):
    """The Euclidean norm of an array, its least and greatest item and its mean, and how many items are zero. With NaN
    or Inf in the array, so are those that they reach."""

    norm: float
    least: float
    greatest: float
    mean: float
    zeros: int


class Bin(NamedTuple):
    """How many `items` are from `low` to `high`; the last bin of a histogram has its `high` too."""

    low: float
    high: float
    items: int


def summary(array: Array) -> Summary:
    """Return the summary of an array, float32 of any shape; of one without items all are 0."""
    if not array.size:
        return Summary(0.0, 0.0, 0.0, 0.0, 0)
    squares = total = 0.0
    zeros = 0
    with np.errstate(invalid="ignore"):  # Inf minus Inf is NaN, and is shown
        for piece in _pieces(array):
            exact = piece.astype(np.float64)
            squares += float(np.dot(exact, exact))
            total += float(exact.sum())
            zeros += piece.size - int(np.count_nonzero(piece))
    return Summary(math.sqrt(squares), float(array.min()), float(array.max()), total / array.size, zeros)


def distance(one: Array, other: Array) -> float:
    """Return the Euclidean distance of two arrays of one shape, float32."""
    with np.errstate(over="ignore", invalid="ignore"):
        pairs = zip(_pieces(one), _pieces(other), strict=True)
        gaps = (a.astype(np.float64) - b for a, b in pairs)
        return math.sqrt(sum(float(np.dot(gap, gap)) for gap in gaps))


def histogram(array: Array, bins: int = BINS) -> list[Bin]:
    """Return so many bins of one width from the least to the greatest finite item; [] if no item is finite."""
    ends = [(float(piece.min()), float(piece.max())) for piece in _finite_pieces(array)]
    if not ends:
        return []
    counts, span = np.zeros(bins, np.int64), (min(low for low, _ in ends), max(high for _, high in ends))
    for piece in _finite_pieces(array):
        of_piece, edges = np.histogram(piece.astype(np.float64), bins, span)
        counts += of_piece
    return [Bin(float(low), float(high), int(n)) for low, high, n in zip(edges, edges[1:], counts, strict=False)]


def _finite_pieces(array: Array) -> Iterator[Array]:
    finite = (piece[np.isfinite(piece)] for piece in _pieces(array))
    return (piece for piece in finite if piece.size)


def _pieces(array: Array) -> Iterator[Array]:
    """Yield the items in flat pieces, so that no copy is larger than a few MB."""
    flat = array.reshape(-1)
    return (flat[start : start + CHUNK_ITEMS] for start in range(0, flat.size, CHUNK_ITEMS))
