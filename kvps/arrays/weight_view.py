"""The view: the weights as workers hold them, if they pull differences in a lossy format. Pure.

Version n comes to workers as d(n), the encoded form of w(n) - v(n-1), and all of them add it to their view:

    v(n) = v(n-1) + decoded(d(n)),  v(0) = w(0)

What d(n) leaves out is still in w(n) - v(n), so the next difference has it (EF21-P: Gruntkowska, Tyurin and Richtárik,
2023). Both sides add the same float32 items in the same way, so whoever holds v(n) holds the same bits.
"""

from __future__ import annotations

import numpy as np

from kvps.arrays.formats import Bytes, Format, Int8, TopK
from kvps.arrays.layout import Array

VIEW = "view"
_MOST = np.finfo(np.float32).max


def has_view(format: Format) -> bool:
    """Return whether workers that pull in this format hold a view. A format that is precise enough is of the weights
    themselves."""
    return isinstance(format, Int8 | TopK)


def advance(format: Format, weights: Array, view: Array, out: Array, scratch: Array, sent: Bytes) -> None:
    """Write the difference of `weights` to `view` to `sent`, (nbytes(n),) bytes, and the view after it to `out`.

    All other arrays are (n,) float32. `scratch` is overwritten. Weights that are NaN give a view that is NaN.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        np.subtract(weights, view, out=scratch)
        np.clip(scratch, -_MOST, _MOST, out=scratch)
        format.encode(scratch, sent)
        follow(format, sent, view, out, scratch)


def follow(format: Format, sent: Bytes, view: Array, out: Array, scratch: Array) -> None:
    """Write to `out` the view after the difference `sent`; `out` may be `view`. Raises ValueError if `advance` did not
    write `sent`."""
    format.decode(sent, scratch)
    np.add(view, scratch, out=out)
