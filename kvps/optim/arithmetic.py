"""What several rules compute alike, in place and in PyTorch's order. Arrays are (n,) float32 of the module `xp`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from kvps.arrays.layout import Array

State = Mapping[str, Array]
"""Slot name -> array."""
f32 = np.float32
_SMALLEST = np.finfo(np.float32).smallest_subnormal


def add_decay(xp: Any, g: Array, w: Array, weight_decay: float, scratch: Array) -> None:
    """Add the gradient of the L2 penalty, in place."""
    if weight_decay:
        xp.add(g, xp.multiply(w, f32(weight_decay), out=scratch), out=g)


def sign_of(xp: Any, array: Array, scratch: Array) -> Array:
    """Replace each item by its sign, as c/|c|, which is exactly 1 or -1; a zero is divided by the smallest number, and
    stays one."""
    xp.absolute(array, out=scratch)
    xp.maximum(scratch, _SMALLEST, out=scratch)
    sign: Array = xp.divide(array, scratch, out=array)
    return sign


def first_moment(xp: Any, before: Array, g: Array, decay: float, out: Array) -> None:
    """``out = before + (1-decay)*(g - before)``; as in torch.lerp from the nearer end, which may be g."""
    weight = f32(1 - decay)
    xp.subtract(g, before, out=out)
    if weight < 0.5:
        xp.add(xp.multiply(out, weight, out=out), before, out=out)
    else:
        xp.subtract(g, xp.multiply(out, f32(1) - weight, out=out), out=out)


def second_moment(xp: Any, before: Array, g: Array, decay: float, out: Array, scratch: Array) -> None:
    """``out = decay*before + (1-decay)*g*g``; `scratch` may be `g`."""
    xp.multiply(g, g, out=scratch)
    xp.multiply(scratch, f32(1 - decay), out=scratch)
    xp.multiply(before, f32(decay), out=out)
    xp.add(out, scratch, out=out)
