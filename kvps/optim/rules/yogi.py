"""Yogi."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from kvps.arrays.layout import Array
from kvps.optim.arithmetic import State, add_decay, f32, first_moment, sign_of
from kvps.optim.optimizer import Optimizer
from kvps.optim.schedules import Schedule

_HALF_OF_MOST = np.finfo(np.float32).max / f32(2)


@dataclass(frozen=True)
class Yogi(Optimizer):
    """Yogi, whose second moment grows and shrinks by a part of g*g alone: Zaheer et al., "Adaptive Methods for
    Nonconvex Optimization", NeurIPS 2018, algorithm 2.

    As the outer optimizer of local steps it is FedYogi (Reddi et al., "Adaptive Federated Optimization", 2021). Both
    moments begin as zeros, and neither is corrected for that; `eps` bounds the first steps. weight_decay adds to the
    gradient.
    """

    lr: float | Schedule = 0.01
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-3
    weight_decay: float = 0.0
    kind: ClassVar[str] = "yogi"
    paper = (
        "[Zaheer et al., 2018](https://papers.nips.cc/paper/8186-adaptive-methods-for-nonconvex-optimization), "
        "algorithm 2: no correction of the moments' bias, and both begin as zeros"
    )
    own_slots = ("m", "v")

    def step(self, w: Array, g: Array, state: State, out: Array, state_out: State, lr: float, t: int, xp: Any) -> None:
        """``m = m + (1-b1)(g-m)``; ``v = v - (1-b2)*sign(v - g*g)*g*g``; ``p = p - lr*m/(sqrt(v) + eps)``.
        (Zaheer et al., 2018, algorithm 2)

        g*g counts at most as half of the largest number: v stays below it, and no infinite v makes NaN."""
        add_decay(xp, g, w, self.weight_decay, out)
        m, v = state_out["m"], state_out["v"]
        first_moment(xp, state["m"], g, self.beta1, m)
        square = xp.multiply(g, g, out=g)
        xp.minimum(square, _HALF_OF_MOST, out=square)
        sign = sign_of(xp, xp.subtract(state["v"], square, out=v), out)
        xp.multiply(square, f32(1 - self.beta2), out=square)
        xp.subtract(state["v"], xp.multiply(sign, square, out=square), out=v)
        scale = xp.sqrt(v, out=out)
        xp.add(scale, f32(self.eps), out=scale)
        change = xp.divide(m, scale, out=g)
        xp.multiply(change, f32(lr), out=change)
        xp.subtract(w, change, out=out)
