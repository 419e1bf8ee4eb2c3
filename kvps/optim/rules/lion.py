"""Lion."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from kvps.arrays.layout import Array
from kvps.optim.arithmetic import State, f32, sign_of
from kvps.optim.optimizer import Optimizer
from kvps.optim.schedules import Schedule


@dataclass(frozen=True)
class Lion(Optimizer):
    """Lion, which steps by the sign of a momentum: Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023.

    Its weight decay is decoupled, as that of AdamW.
    """

    lr: float | Schedule = 0.0001
    beta1: float = 0.9
    beta2: float = 0.99
    weight_decay: float = 0.0
    kind: ClassVar[str] = "lion"
    paper = "[Chen et al., 2023](https://arxiv.org/abs/2302.06675)"
    own_slots = ("m",)

    def step(self, w: Array, g: Array, state: State, out: Array, state_out: State, lr: float, t: int, xp: Any) -> None:
        """``c = b1*m + (1-b1)*g``; ``p = (1 - lr*wd)*p - lr*sign(c)``; ``m = b2*m + (1-b2)*g``. (Chen et al., 2023,
        algorithm 2)"""
        m = state_out["m"]
        xp.multiply(state["m"], f32(self.beta1), out=out)
        xp.add(out, xp.multiply(g, f32(1 - self.beta1), out=m), out=out)
        sign = sign_of(xp, out, m)
        xp.multiply(state["m"], f32(self.beta2), out=m)
        xp.add(m, xp.multiply(g, f32(1 - self.beta2), out=g), out=m)
        xp.multiply(sign, f32(lr), out=sign)
        if self.weight_decay:
            w = xp.multiply(w, f32(1 - lr * self.weight_decay), out=g)
        xp.subtract(w, sign, out=out)
