"""Adadelta."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from kvps.arrays.layout import Array
from kvps.optim.arithmetic import State, add_decay, f32, second_moment
from kvps.optim.optimizer import Optimizer
from kvps.optim.schedules import Schedule
from kvps.optim.settings import require


@dataclass(frozen=True)
class Adadelta(Optimizer):
    """Adadelta as in PyTorch: Zeiler, "ADADELTA: An Adaptive Learning Rate Method", 2012."""

    lr: float | Schedule = 1.0
    rho: float = 0.9
    eps: float = 1e-6
    weight_decay: float = 0.0
    kind: ClassVar[str] = "adadelta"
    torch_name = "Adadelta"
    own_slots = ("square", "delta")

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.rho <= 1, f"adadelta: rho must be in [0, 1], it is {self.rho}")

    def step(self, w: Array, g: Array, state: State, out: Array, state_out: State, lr: float, t: int, xp: Any) -> None:
        """``h = rho*h + (1-rho)g*g``; ``d = sqrt(a + eps)/sqrt(h + eps)*g``; ``a = rho*a + (1-rho)d*d``;
        ``p = p - lr*d``. (torch.optim.Adadelta)"""
        add_decay(xp, g, w, self.weight_decay, out)
        square, total = state_out["square"], state_out["delta"]
        second_moment(xp, state["square"], g, self.rho, square, out)
        xp.add(square, f32(self.eps), out=out)
        xp.sqrt(out, out=out)
        xp.add(state["delta"], f32(self.eps), out=total)
        xp.sqrt(total, out=total)
        xp.divide(total, out, out=total)
        change = xp.multiply(total, g, out=g)
        second_moment(xp, state["delta"], change, self.rho, total, out)
        xp.multiply(change, f32(lr), out=change)
        xp.subtract(w, change, out=out)
