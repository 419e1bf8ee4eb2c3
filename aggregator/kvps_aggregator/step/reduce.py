"""Reduces contributions to one gradient. Pure, and the order is part of the result.

Contributions come in rank order, and are added in float32, beginning with the first. `mean` then divides by
float32(divisor), the number of workers present or finished. `median` and `trimmed` sort each item over all
contributions, by minima and maxima, so they need as much memory as all of them together (Yin et al., "Byzantine-Robust
Distributed Learning: Towards Optimal Statistical Rates", 2018). Any process that computes in this order gets the same
bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from kvps.arrays.digest import finite
from kvps.arrays.layout import Array
from kvps.reductions import Reduction


def reduce(
    reduction: Reduction,
    contributions: Iterable[Array],
    weights: Sequence[int],
    divisor: int,
    out: Array,
    xp: Any = np,
) -> bool:
    """Write the gradient to step by into `out`. Return False if a contribution, or the result, is not finite.

    contributions  (n,) arrays of `xp`, not written to, and not used any more when the second one after is requested
    weights        of `weighted`: the weight of each contribution
    divisor        of `mean`: what divides the sum

    Without contributions the gradient is zeros.
    """
    if reduction.is_ordered:
        return _ordered(reduction, contributions, out, xp)
    if reduction.kind == "weighted":
        _weighted(contributions, weights, out, xp)
    else:
        _total(contributions, out, xp)
    if reduction.kind == "mean" and divisor != 1:
        xp.divide(out, np.float32(divisor), out=out)
    return finite(out)


def _total(contributions: Iterable[Array], out: Array, xp: Any) -> None:
    """Sum the contributions, in their order."""
    rest = iter(contributions)
    first = next(rest, None)
    second = next(rest, None)
    if first is None:
        out.fill(0)
    elif second is None:
        xp.copyto(out, first)
    else:
        xp.add(first, second, out=out)
    for contribution in rest:
        xp.add(out, contribution, out=out)


def _weighted(contributions: Iterable[Array], weights: Sequence[int], out: Array, xp: Any) -> None:
    """The sum of weight times contribution, divided by the sum of the weights. Each product is rounded once."""
    out.fill(0)
    product = xp.empty(out.shape, out.dtype) if len(weights) > 1 else out
    for number, (contribution, weight) in enumerate(zip(contributions, weights, strict=True)):
        xp.multiply(contribution, np.float32(weight), out=product if number else out)
        if number:
            xp.add(out, product, out=out)
    if weights:
        xp.divide(out, np.float32(sum(weights)), out=out)


def _ordered(reduction: Reduction, contributions: Iterable[Array], out: Array, xp: Any) -> bool:
    """The middle of the sorted values, or the mean of those between both ends. Return whether all are finite."""
    rows = [xp.add(contribution, np.float32(0)) for contribution in contributions]  # copies, without negative zeros
    are_finite = all(map(finite, rows))
    if not rows:
        out.fill(0)
        return True
    _sort(rows, out, xp)
    count = len(rows)
    cut = (count - 1) // 2 if reduction.kind == "median" else round(reduction.part * 1_000_000) * count // 1_000_000
    middle = rows[cut : count - cut]
    _total(middle, out, xp)
    if len(middle) > 1:
        xp.divide(out, np.float32(len(middle)), out=out)
    return are_finite


def _sort(rows: list[Array], scratch: Array, xp: Any) -> None:
    """Sort each item over the rows, in place, by an odd-even transposition network: exact on every device."""
    for phase in range(len(rows)):
        for low in range(phase % 2, len(rows) - 1, 2):
            xp.minimum(rows[low], rows[low + 1], out=scratch)
            xp.maximum(rows[low], rows[low + 1], out=rows[low + 1])
            xp.copyto(rows[low], scratch)
