"""Compensates stale gradients for their delay. Pure, and the order of the operations is part of the result.

A gradient g that was computed on the weights w_bak becomes, before it is scaled and reduced,

    g + lambda * g*g * (w_now - w_bak)

element by element (DC-ASGD: Zheng et al., "Asynchronous Stochastic Gradient Descent with Delay Compensation", ICML
2017, arXiv 1609.08326). It is the Taylor expansion of the gradient at w_now, with lambda * g*g in place of the Hessian.

Each operation is one of float32: the difference, times g, times lambda, times g, and then g plus all that. So a large
gradient does not overflow where the weights did not move, as its square would.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from kvps.arrays.layout import Array
from kvps.protocol.plan import Contribution, Plan


def staleness_of(plan: Plan, contribution: Contribution) -> int:
    """Return how many versions were made since the one that a contribution of a plan was computed on."""
    return max(0, plan.version - 1 - contribution.base)


def compensate(strength: float, gradient: Array, now: Array, before: Array, out: Array, xp: Any = np) -> None:
    """Write `gradient`, which was computed on the weights `before` and is applied to `now`, to `out`, compensated.

    All are (n,) float32 arrays of `xp`, and `out` is none of the others. `strength` is lambda.
    """
    xp.subtract(now, before, out=out)
    xp.multiply(out, gradient, out=out)
    xp.multiply(out, np.float32(strength), out=out)
    xp.multiply(out, gradient, out=out)
    xp.add(gradient, out, out=out)


def compensated(
    strength: float, gradients: Iterable[Array], now: Array, befores: Sequence[Array | None], items: int, xp: Any = np
) -> Iterator[Array]:
    """Yield each gradient with its first `items` compensated, in one of two arrays; as it is if its weights `before`
    are None. What is behind these items, the buffers of a model, is no gradient."""
    outs = [xp.empty(now.shape, now.dtype) for _ in range(2)]
    for number, (gradient, before) in enumerate(zip(gradients, befores, strict=True)):
        if before is None:
            yield gradient
        else:
            out = outs[number % 2]
            compensate(strength, gradient[:items], now[:items], before[:items], out[:items], xp)
            xp.copyto(out[items:], gradient[items:])
            yield out
