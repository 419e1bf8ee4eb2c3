"""Norms over all shards: clipping of the reduced gradient, and outliers among the contributions. Pure.

A gradient whose norm is above `clip_norm` is scaled by ``clip_norm / (norm + 1e-6)``, as torch.nn.utils.clip_grad_norm_
does (Pascanu et al., "On the difficulty of training recurrent neural networks", 2013). Squares of float32 are exact in
float64. They are added in halves, which is one order on every machine; then chunk by chunk, and shard by shard.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

import numpy as np

from kvps.arrays.layout import Array

_EPS = 1e-6
_LEAST_COMPARED = 3  # contributions, so that the median is not between a right one and a wrong one


def square_sum(gradient: Array) -> float:
    """Return the sum of the squares of a chunk, (n,) float32 in host memory."""
    squares = gradient.astype(np.float64)
    np.multiply(squares, squares, out=squares)
    left = squares.size
    while left > 1:
        kept = (left + 1) // 2
        np.add(squares[: left - kept], squares[kept:left], out=squares[: left - kept])
        left = kept
    return float(squares[0]) if left else 0.0


def scale_of(clip_norm: float, square_sums: Iterable[float]) -> np.float32:
    """Return what to multiply the gradient by; `square_sums` are those of the shards. It is 1 if the gradient is short
    enough, or `clip_norm` is 0."""
    if not clip_norm:
        return np.float32(1)
    total = 0.0
    for each in square_sums:
        total += each
    return np.float32(min(1.0, clip_norm / (math.sqrt(total) + _EPS)))


def outlier(times: float | None, square_sums: Sequence[Sequence[float]]) -> tuple[int, str] | None:
    """Return the number of the contribution with the greatest norm, and why it is an outlier; None if it is none.

    It is one if its norm is more than `times` the median norm. `square_sums` has for each shard the sum of squares of
    each contribution. With fewer than three contributions, or without `times`, none is one.
    """
    norms = [math.sqrt(sum(parts)) for parts in zip(*square_sums, strict=True)]
    if not times or len(norms) < _LEAST_COMPARED:
        return None
    greatest, median = max(norms), statistics.median(norms)
    if greatest <= times * median:
        return None
    return norms.index(greatest), f"its norm {greatest:.4g} is more than {times:g} times the median, {median:.4g}"
