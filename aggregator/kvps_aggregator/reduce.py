"""How contributions become one gradient. Pure, and the order is part of the result.

Added in rank order, in float32, beginning with the first; `mean` then divides by float32(divisor): the workers
that are there or have done all their rounds. Any process that adds in this order gets the same bits.
"""

from __future__ import annotations

import numpy as np

from kvps.layout import Array


def add(total: Array, contribution: Array) -> None:
    """Add the next contribution, in place; both of shape (n,)."""
    np.add(total, contribution, out=total)


def finish(total: Array, reduction: str, divisor: int) -> None:
    """Turn the sum into the gradient to step by, in place: `mean` divides by `divisor`, `sum` leaves it."""
    if reduction == "mean" and divisor != 1:
        np.divide(total, np.float32(divisor), out=total)
