"""The buffers of a version, made of those that its contributions bring. Pure.

A contribution has its worker's own buffers behind its gradient. They are no gradient: they are not added to what the
job had, but take its place. So `rank0` is the bits of one worker's buffers, and no average of variances is negative,
however stale the contributions are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from kvps.arrays.layout import Array


def reduce_buffers(
    contributions: Iterable[Array], weights: Sequence[int], kind: str, out: Array, xp: Any = np
) -> Iterator[Array]:
    """Yield the contributions without their last items, which are buffers, and reduce these to `out`, (n,) float32.

    kind  rank0: those of the first contribution, as they come in rank order; average: the mean by `weights`

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
