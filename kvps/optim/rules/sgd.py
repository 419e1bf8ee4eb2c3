"""Stochastic gradient descent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from kvps.arrays.layout import Array
from kvps.optim.arithmetic import State, add_decay, f32
from kvps.optim.optimizer import Optimizer
from kvps.optim.schedules import Schedule
from kvps.optim.settings import require


@dataclass(frozen=True)
class SGD(Optimizer):
    """Stochastic gradient descent, with momentum, Nesterov's momentum and L2 weight decay as in PyTorch.

    `dampening` weakens what each gradient adds to the momentum, but for that of version 1.
    """

    lr: float | Schedule = 0.1
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    dampening: float = 0.0
    kind: ClassVar[str] = "sgd"
    torch_name = "SGD"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.momentum > 0 or not self.nesterov, "sgd: nesterov needs a momentum above 0")
        require(self.dampening == 0 or not self.nesterov, "sgd: nesterov needs a dampening of 0")

    @property
    def own_slots(self) -> tuple[str, ...]:
        return ("momentum",) if self.momentum else ()

    @property
    def counts_steps(self) -> bool:
        return self.dampening > 0

    def step(self, w: Array, g: Array, state: State, out: Array, state_out: State, lr: float, t: int, xp: Any) -> None:
        """``b = mu*b + (1-d)*g``; ``p = p - lr*b``, or with Nesterov ``p = p - lr*(g + mu*b)``. (torch.optim.SGD)"""
        add_decay(xp, g, w, self.weight_decay, out)
        if self.momentum:
            buf = state_out["momentum"]
            xp.multiply(state["momentum"], f32(self.momentum), out=buf)
            damped = t > 1 and self.dampening
            xp.add(buf, xp.multiply(g, f32(1 - self.dampening), out=out) if damped else g, out=buf)
            if self.nesterov:
                xp.multiply(buf, f32(self.momentum), out=out)
                xp.add(g, out, out=g)
            else:
                g = buf
        xp.multiply(g, f32(lr), out=out)
        xp.subtract(w, out, out=out)
