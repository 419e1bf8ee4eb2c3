"""RMSprop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from kvps.arrays.layout import Array
from kvps.optim.arithmetic import State, add_decay, f32, first_moment, second_moment
from kvps.optim.optimizer import Optimizer
from kvps.optim.schedules import Schedule


@dataclass(frozen=True)
class RMSprop(Optimizer):
    """RMSprop as in PyTorch: Tieleman and Hinton, "Lecture 6.5: RMSprop", 2012.

    `centered` divides by the variance of the gradient: Graves, "Generating Sequences with RNNs", 2013.
    """

    lr: float | Schedule = 0.01
    alpha: float = 0.99
    eps: float = 1e-8
    momentum: float = 0.0
    centered: bool = False
    weight_decay: float = 0.0
    kind: ClassVar[str] = "rmsprop"
    torch_name = "RMSprop"

    @property
    def own_slots(self) -> tuple[str, ...]:
        return ("square", *["mean"] * self.centered, *["momentum"] * (self.momentum > 0))

    def step(self, w: Array, g: Array, state: State, out: Array, state_out: State, lr: float, t: int, xp: Any) -> None:
        """``h = a*h + (1-a)g*g``; ``p = p - lr*g/(sqrt(h) + eps)``. Centered, it is ``sqrt(h - m*m)`` with
        ``m = m + (1-a)(g-m)``; with momentum, ``b = mu*b + g/(...)`` and ``p = p - lr*b``. (torch.optim.RMSprop)

        Where rounding makes the variance ``h - m*m`` negative, it is 0 here and NaN in PyTorch."""
        add_decay(xp, g, w, self.weight_decay, out)
        square = state_out["square"]
        second_moment(xp, state["square"], g, self.alpha, square, out)
        scale = square
        if self.centered:
            mean = state_out["mean"]
            first_moment(xp, state["mean"], g, self.alpha, mean)
            xp.subtract(square, xp.multiply(mean, mean, out=out), out=out)
            scale = xp.maximum(out, f32(0), out=out)
        xp.sqrt(scale, out=out)
        xp.add(out, f32(self.eps), out=out)
        change = xp.divide(g, out, out=g)
        if self.momentum:
            buf = state_out["momentum"]
            xp.multiply(state["momentum"], f32(self.momentum), out=buf)
            change = xp.add(buf, change, out=buf)
        xp.multiply(change, f32(lr), out=out)
        xp.subtract(w, out, out=out)
