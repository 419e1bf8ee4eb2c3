"""Adam and AdamW."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from kvps.arrays.layout import Array
from kvps.optim.arithmetic import State, add_decay, f32, first_moment, second_moment
from kvps.optim.optimizer import Optimizer
from kvps.optim.schedules import Schedule


@dataclass(frozen=True)
class Adam(Optimizer):
    """Adam: Kingma and Ba, "Adam: A Method for Stochastic Optimization", 2015; weight decay adds to the gradient.

    `amsgrad` divides by the largest second moment so far: Reddi et al., "On the Convergence of Adam and Beyond", 2018.
    """

    lr: float | Schedule = 0.001
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    amsgrad: bool = False
    kind: ClassVar[str] = "adam"
    torch_name = "Adam"
    torch_only: ClassVar[Mapping[str, Any]] = {"decoupled_weight_decay": False}
    counts_steps = True

    @property
    def own_slots(self) -> tuple[str, ...]:
        return ("m", "v", *["vmax"] * self.amsgrad)

    def step(self, w: Array, g: Array, state: State, out: Array, state_out: State, lr: float, t: int, xp: Any) -> None:
        """``m = m + (1-b1)(g-m)``; ``v = b2*v + (1-b2)g*g``;
        ``p = p - lr/(1-b1^t) * m / (sqrt(v)/sqrt(1-b2^t) + eps)``; with AMSGrad, of the largest v so far.
        (torch.optim.Adam and AdamW; Kingma and Ba, 2015)"""
        decoupled = isinstance(self, AdamW)
        add_decay(xp, g, w, 0.0 if decoupled else self.weight_decay, out)
        m, v = state_out["m"], state_out["v"]
        first_moment(xp, state["m"], g, self.beta1, m)
        second_moment(xp, state["v"], g, self.beta2, v, g)
        if self.amsgrad:
            v = xp.maximum(state["vmax"], v, out=state_out["vmax"])
        scale = xp.sqrt(v, out=g)
        xp.divide(scale, f32(math.sqrt(1 - self.beta2**t)), out=scale)
        xp.add(scale, f32(self.eps), out=scale)
        change = xp.divide(m, scale, out=g)
        xp.multiply(change, f32(lr / (1 - self.beta1**t)), out=change)
        if decoupled:
            w = xp.multiply(w, f32(1 - lr * self.weight_decay), out=out)
        xp.subtract(w, change, out=out)


@dataclass(frozen=True)
class AdamW(Adam):
    """AdamW: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019."""

    weight_decay: float = 0.01
    kind: ClassVar[str] = "adamw"
    torch_name = "AdamW"
    torch_only: ClassVar[Mapping[str, Any]] = {"decoupled_weight_decay": True}
