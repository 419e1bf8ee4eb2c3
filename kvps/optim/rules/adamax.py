"""Adamax."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from kvps.arrays.layout import Array
from kvps.optim.arithmetic import State, add_decay, f32, first_moment
from kvps.optim.optimizer import Optimizer
from kvps.optim.schedules import Schedule


@dataclass(frozen=True)
class Adamax(Optimizer):
    """Adamax, which divides by the largest gradient: Kingma and Ba, 2015, algorithm 2."""

    lr: float | Schedule = 0.002
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    kind: ClassVar[str] = "adamax"
    torch_name = "Adamax"
    own_slots = ("m", "u")
    counts_steps = True

    def step(self, w: Array, g: Array, state: State, out: Array, state_out: State, lr: float, t: int, xp: Any) -> None:
        """``m = m + (1-b1)(g-m)``; ``u = max(b2*u, |g| + eps)``; ``p = p - lr/(1-b1^t) * m/u``. (torch.optim.Adamax)"""
        add_decay(xp, g, w, self.weight_decay, out)
        m, largest = state_out["m"], state_out["u"]
        first_moment(xp, state["m"], g, self.beta1, m)
        xp.multiply(state["u"], f32(self.beta2), out=largest)
        xp.absolute(g, out=g)
        xp.add(g, f32(self.eps), out=g)
        xp.maximum(largest, g, out=largest)
        change = xp.divide(m, largest, out=g)
        xp.multiply(change, f32(lr / (1 - self.beta1**t)), out=change)
        xp.subtract(w, change, out=out)
