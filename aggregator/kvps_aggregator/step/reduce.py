"""Reduces contributions to one gradient. Pure, and the order is part of the result.

Contributions are added in rank order, in float32, beginning with the first. `mean` then divides by float32(divisor),
the number of workers present or finished. Any process that adds in this order gets the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from kvps.arrays.layout import Array


def total(contributions: Iterable[Array], out: Array, xp: Any = np) -> None:
    """Sum the contributions, in their order, into `out`; all are (n,) arrays of `xp`. Without any, write zeros."""
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


def finish(total: Array, reduction: str, divisor: int, xp: Any = np) -> None:
    """Turn the sum into the gradient to step by, in place: `mean` divides by `divisor`, `sum` leaves it."""
    if reduction == "mean" and divisor != 1:
        xp.divide(total, np.float32(divisor), out=total)
