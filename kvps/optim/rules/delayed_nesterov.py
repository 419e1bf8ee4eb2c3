"""Delayed Nesterov."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from kvps.arrays.layout import Array
from kvps.errors import shown
from kvps.optim.arithmetic import State, f32
from kvps.optim.optimizer import Optimizer
from kvps.optim.schedules import Schedule
from kvps.optim.settings import require

_MOST_EVERY = 1_000_000


@dataclass(frozen=True)
class DelayedNesterov(Optimizer):
    """Nesterov's momentum that steps once in N versions: Liu et al., "Asynchronous Local-SGD Training for Language
    Modeling", 2024, arXiv 2401.09135, algorithm 3.

    With the gradient g, the momentum m and the sum D of the gradients since m stepped, all 0 at first:

        D = D + g
        in every N-th version:  m = momentum*m + D/N,  p = p - lr*(g/N + (1 - c*N + c)*momentum*m),  D = 0
        in any other version:   p = p - lr*(g/N + c*momentum*m)

    Momentum that steps with every stale gradient goes on in the direction of the oldest. Here it steps by the mean of N
    of them. With ``every=1`` it is the Nesterov momentum of `SGD`.

    every  N, a whole number from 1: in the paper, of contributions, as many as there are workers. Here it counts
           versions; docs/optimizers.md says what that changes
    c      how much of the momentum is applied in each of the other versions, from 0 to 1/N
    """

    lr: float | Schedule = 0.7
    momentum: float = 0.9
    every: int = field(kw_only=True)
    c: float = 0.0
    kind: ClassVar[str] = "delayed-nesterov"
    paper = "[Liu et al., 2024](https://arxiv.org/abs/2401.09135), algorithm 3; no `weight_decay`"
    own_slots = ("momentum", "buffer")
    counts_steps = True

    def __post_init__(self) -> None:
        super().__post_init__()
        fits = isinstance(self.every, int) and not isinstance(self.every, bool) and 1 <= self.every <= _MOST_EVERY
        require(
            fits, f"delayed-nesterov: every must be a whole number from 1 to {_MOST_EVERY}, not {shown(self.every)}"
        )
        require(0 <= self.c <= 1 / self.every, f"delayed-nesterov: c must be from 0 to 1/every, it is {self.c}")

    def step(self, w: Array, g: Array, state: State, out: Array, state_out: State, lr: float, t: int, xp: Any) -> None:
        """``D = D + g``; every N-th time ``m = mu*m + D/N``, ``D = 0``; ``p = p - lr*(g/N + k*mu*m)``, where k is
        ``1 - c*N + c`` then and else ``c``. (Liu et al., 2024, algorithm 3)"""
        m, total, n = state_out["momentum"], state_out["buffer"], self.every
        xp.add(state["buffer"], g, out=total)
        if t % n:
            part = self.c
            xp.copyto(m, state["momentum"])
        else:
            part = 1 - self.c * n + self.c
            xp.divide(total, f32(n), out=total)
            xp.multiply(state["momentum"], f32(self.momentum), out=m)
            xp.add(m, total, out=m)
            total.fill(0)
        xp.divide(g, f32(n), out=g)
        if part:
            xp.add(g, xp.multiply(m, f32(part * self.momentum), out=out), out=g)
        xp.multiply(g, f32(lr), out=g)
        xp.subtract(w, g, out=out)
