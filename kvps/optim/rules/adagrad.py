"""Adagrad."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from kvps.arrays.layout import Array
from kvps.optim.arithmetic import State, add_decay, f32
from kvps.optim.optimizer import Optimizer
from kvps.optim.schedules import Schedule


@dataclass(frozen=True)
class Adagrad(Optimizer):
    """Adagrad as in PyTorch: Duchi, Hazan and Singer, "Adaptive Subgradient Methods", JMLR 2011."""

    lr: float | Schedule = 0.01
    eps: float = 1e-10
    weight_decay: float = 0.0
    lr_decay: float = 0.0
    kind: ClassVar[str] = "adagrad"
    torch_name = "Adagrad"
    torch_only: ClassVar[Mapping[str, Any]] = {"initial_accumulator_value": 0}
    own_slots = ("sum",)

    @property
    def counts_steps(self) -> bool:
        return self.lr_decay > 0

    def step(self, w: Array, g: Array, state: State, out: Array, state_out: State, lr: float, t: int, xp: Any) -> None:
        """``h = h + g*g``; ``p = p - lr/(1 + (t-1)*lr_decay)*g/(sqrt(h) + eps)``. (torch.optim.Adagrad)"""
        add_decay(xp, g, w, self.weight_decay, out)
        total = state_out["sum"]
        xp.multiply(g, g, out=out)
        xp.add(state["sum"], out, out=total)
        scale = xp.sqrt(total, out=out)
        xp.add(scale, f32(self.eps), out=scale)
        xp.divide(g, scale, out=g)
        xp.multiply(g, f32(lr / (1 + (t - 1) * self.lr_decay)), out=g)
        xp.subtract(w, g, out=out)
