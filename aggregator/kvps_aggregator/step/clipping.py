"""Clipping of the reduced gradient by its global norm, over all shards. Pure.

If the norm is above `clip_norm`, the gradient is scaled by ``clip_norm / (norm + 1e-6)``, as torch.nn.utils
.clip_grad_norm_ does (Pascanu et al., "On the difficulty of training recurrent neural networks", 2013). Squares of
float32 are exact in float64. They are added in halves, which is one order on every machine; then chunk by chunk, and
shard by shard.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from kvps.arrays.layout import Array

_EPS = 1e-6


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
    """Return what to multiply the gradient by, 1 if it is short enough; `square_sums` are those of the shards."""
    total = 0.0
    for each in square_sums:
        total += each
    return np.float32(min(1.0, clip_norm / (math.sqrt(total) + _EPS)))
