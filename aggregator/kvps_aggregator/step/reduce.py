"""Reduces contributions to one gradient. Pure, and the order is part of the result.

Contributions come in rank order, and are added in float32, beginning with the first. `mean` then divides by
float32(divisor), the number of workers present or finished. `median` and `trimmed` sort each item over all
contributions, by minima and maxima, so they need as much memory as all of them together (Yin et al., "Byzantine-Robust
Distributed Learning: Towards Optimal Statistical Rates", 2018). Any process that computes in this order gets the same
bits.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from kvps.arrays.digest import finite, finite_square_sum
from kvps.arrays.layout import Array
from kvps.config import JobConfig
from kvps.errors import NotFinite
from kvps.optim.reductions import SCALINGS, Reduction, custom, parse
from kvps.protocol.plan import Contribution, Plan

_function_of = lru_cache(maxsize=64)(custom)  # imports the user's function once


def reduce_plan(
    config: JobConfig,
    plan: Plan,
    counting: Sequence[Contribution],
    contributions: Iterable[Array],
    out: Array,
    buffers: Array,
    kind: str,
    xp: Any = np,
) -> float:
    """Write the gradient that `contributions` make into `out`, and return what `reduce` returns. They are the values of
    `counting`, those contributions of the plan that count here. Stale ones are scaled first, if the job says so. Reduce
    the buffers behind each gradient to `buffers`; see `reduce_buffers`."""
    scaling = SCALINGS[config.staleness_scaling]
    weights = [c.weight for c in counting]
    if buffers.size:
        contributions = reduce_buffers(contributions, weights, kind, buffers, xp)
    factors = [scaling(_staleness_of(plan, c)) for c in counting]
    if any(factor != 1 for factor in factors):
        contributions = _scaled(contributions, factors, out, xp)
    square_sum = 0.0
    with np.errstate(over="ignore", invalid="ignore"):  # NaN in the result tells of it
        if out.size:
            square_sum = reduce(parse(config.reduction), contributions, weights, plan.divisor, out, xp)
        else:  # a chunk of buffers alone: a reduction of the user's own is for one item or more
            deque(contributions, maxlen=0)
    return square_sum if not buffers.size or finite(buffers) else math.nan


def reduce_buffers(
    contributions: Iterable[Array], weights: Sequence[int], kind: str, out: Array, xp: Any = np
) -> Iterator[Array]:
    """Yield the contributions without their last items, which are buffers, and reduce these to `out`, (n,) float32.

    kind  rank0: those of the first contribution, as they come in rank order; average: the mean by `weights`

    Buffers are no gradient: they are not added to what the job had, but take its place. So no average of variances is
    negative, however stale the contributions are.

    The mean is ``m = m + (x - m) * w / W``, where W is the sum of the weights so far (West, "Updating Mean and Variance
    Estimates", 1979). Of equal values it is that value, so what no worker has changed stays as it is.
    """
    out.fill(0)
    apart = xp.empty(out.shape, out.dtype)
    total = 0
    for contribution, weight in zip(contributions, weights, strict=True):
        own = contribution[contribution.size - out.size :]
        if not total:
            xp.copyto(out, own)
        elif kind == "average":
            xp.subtract(own, out, out=apart)
            xp.multiply(apart, np.float32(weight / (total + weight)), out=apart)
            xp.add(out, apart, out=out)
        total += weight
        yield contribution[: contribution.size - out.size]


def sizes(
    config: JobConfig, plan: Plan, counting: Sequence[Contribution], contributions: Iterable[Array]
) -> list[float]:
    """Return the largest magnitude that each contribution of `counting`, (n,) in host memory, has where it is reduced;
    Inf if it has NaN or Inf."""
    scaling, is_weighted = SCALINGS[config.staleness_scaling], config.reduction == "weighted"
    magnitudes = []
    with np.errstate(over="ignore", invalid="ignore"):
        for c, values in zip(counting, contributions, strict=True):
            factor = scaling(_staleness_of(plan, c)) * (c.weight if is_weighted else 1)
            magnitudes.append(factor * float(np.abs(values).max()) if finite(values) else math.inf)
    return magnitudes


def _staleness_of(plan: Plan, contribution: Contribution) -> int:
    """Return how many versions were made since the one that a contribution of a plan was computed on."""
    return max(0, plan.version - 1 - contribution.base)


def _scaled(contributions: Iterable[Array], factors: Sequence[float], like: Array, xp: Any) -> Iterator[Array]:
    """Yield each contribution times its factor, in one of two buffers."""
    buffers = [xp.empty(like.shape, like.dtype) for _ in range(2)]
    for number, (contribution, factor) in enumerate(zip(contributions, factors, strict=True)):
        yield xp.multiply(contribution, np.float32(factor), out=buffers[number % 2])


def reduce(
    reduction: Reduction, contributions: Iterable[Array], weights: Sequence[int], divisor: int, out: Array, xp: Any = np
) -> float:
    """Write the gradient to step by into `out`. Return the sum of its squares, or NaN if a contribution, or the result,
    is not finite. The sum is of float32's precision.

    contributions  (n,) arrays of `xp`, not written to, and not used any more when the second one after is requested
    weights        of `weighted` and of the user's own: the weight of each contribution
    divisor        of `mean`: what divides the sum

    Without contributions the gradient is zeros. Raises NotFinite if a reduction of the user's own makes NaN or Inf of
    finite contributions.
    """
    if reduction.is_ordered:
        are_finite = _ordered(reduction, contributions, out, xp)
    elif reduction.kind == "custom":
        are_finite = _custom(reduction, contributions, weights, out, xp)
    else:
        are_finite = True  # a sum shows it
        if reduction.kind == "weighted":
            _weighted(contributions, weights, out, xp)
        else:
            _total(contributions, out, xp)
        if reduction.kind == "mean" and divisor != 1:
            xp.divide(out, np.float32(divisor), out=out)
    square_sum = finite_square_sum(out) if are_finite else math.nan
    if are_finite and math.isnan(square_sum) and reduction.name:
        raise NotFinite(f"reduction {reduction.name!r} makes NaN or Inf of finite contributions: mend it")
    return square_sum


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
    """The middle of the sorted values, or the mean of those between both ends. Return whether all contributions are
    finite."""
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


def _custom(reduction: Reduction, contributions: Iterable[Array], weights: Sequence[int], out: Array, xp: Any) -> bool:
    """The user's own; see `kvps.optim.reductions.Function`. Return whether all contributions are finite.

    The user's function need not know what NaN is, and gets zeros for it: item by item, because a replay cuts arrays in
    other places.
    """
    rows, are_finite = [], True
    for contribution in contributions:
        row = xp.empty(out.shape, out.dtype)
        xp.copyto(row, contribution)
        if not finite(row):
            row, are_finite = xp.where(np.isfinite(row), row, np.float32(0)), False
        rows.append(row)
    if not rows:
        out.fill(0)
        return True
    _function_of(reduction.name)(rows, list(weights), out, xp)
    return are_finite


def prepare(reduction: str) -> None:
    """Import a reduction of the user's own now, and not at the first step. Raises InvalidSetting."""
    if name := parse(reduction).name:
        _function_of(name)


def _sort(rows: list[Array], scratch: Array, xp: Any) -> None:
    """Sort each item over the rows, in place, by an odd-even transposition network: exact on every device."""
    for phase in range(len(rows)):
        for low in range(phase % 2, len(rows) - 1, 2):
            xp.minimum(rows[low], rows[low + 1], out=scratch)
            xp.maximum(rows[low], rows[low + 1], out=rows[low + 1])
            xp.copyto(rows[low], scratch)
