"""How contributions become one gradient. Pure, and the order is part of the result.

Added in rank order, in float32, beginning with the first; `mean` then divides by float32(divisor): the workers
that are there or have done all their rounds. Any process that adds in this order gets the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kvps.layout import Array


def total(contributions: Iterable[Array], out: Array) -> None:
    """The sum of contributions, in their order, into `out`, all of shape (n,); zeros if there is none."""
    rest = iter(contributions)
    first = next(rest, None)
    second = next(rest, None)
    if first is None:
        out.fill(0)
    elif second is None:
        np.copyto(out, first)
    else:
        np.add(first, second, out=out)
    for contribution in rest:
        np.add(out, contribution, out=out)


def finish(total: Array, reduction: str, divisor: int) -> None:
    """Turn the sum into the gradient to step by, in place: `mean` divides by `divisor`, `sum` leaves it."""
    if reduction == "mean" and divisor != 1:
        np.divide(total, np.float32(divisor), out=total)
