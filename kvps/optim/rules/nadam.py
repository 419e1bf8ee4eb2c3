"""NAdam."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

from kvps.arrays.layout import Array
from kvps.optim.arithmetic import State, add_decay, f32, first_moment, second_moment
from kvps.optim.optimizer import Optimizer
from kvps.optim.schedules import Schedule


@dataclass(frozen=True)
class NAdam(Optimizer):
    """NAdam as in PyTorch: Dozat, "Incorporating Nesterov Momentum into Adam", 2016."""

    lr: float | Schedule = 0.002
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum_decay: float = 0.004
    decoupled_weight_decay: bool = False
    kind: ClassVar[str] = "nadam"
    torch_name = "NAdam"
    own_slots = ("m", "v")
    counts_steps = True

    def step(self, w: Array, g: Array, state: State, out: Array, state_out: State, lr: float, t: int, xp: Any) -> None:
        """Moments as Adam's; with ``d = sqrt(v/(1-b2^t)) + eps`` and the momenta ``mu(t)``, whose product is ``M(t)``:
        ``p = p - lr*(1-mu(t))/(1-M(t)) * g/d - lr*mu(t+1)/(1-M(t+1)) * m/d``. (torch.optim.NAdam)"""
        add_decay(xp, g, w, 0.0 if self.decoupled_weight_decay else self.weight_decay, out)
        m, v = state_out["m"], state_out["v"]
        first_moment(xp, state["m"], g, self.beta1, m)
        second_moment(xp, state["v"], g, self.beta2, v, out)
        product, following = (
            _momenta(self.beta1, self.momentum_decay, t),
            _momentum(self.beta1, self.momentum_decay, t + 1),
        )

        def scale() -> Array:
            xp.divide(v, f32(1 - self.beta2**t), out=out)
            xp.sqrt(out, out=out)
            scale: Array = xp.add(out, f32(self.eps), out=out)
            return scale

        xp.divide(g, scale(), out=g)
        xp.multiply(g, f32(lr * (1 - _momentum(self.beta1, self.momentum_decay, t)) / (1 - product)), out=g)
        if self.decoupled_weight_decay:
            w = xp.multiply(w, f32(1 - lr * self.weight_decay), out=out)
        xp.subtract(w, g, out=g)
        change = xp.divide(m, scale(), out=out)  # computed again: there is no third array to keep it in
        xp.multiply(change, f32(lr * following / (1 - product * following)), out=change)
        xp.subtract(g, change, out=out)


def _momentum(beta1: float, decay: float, step: int) -> float:
    """Return the momentum of a step: ``b1 * (1 - 0.96^(t*decay)/2)``."""
    return float(beta1 * (1.0 - 0.5 * 0.96 ** (step * decay)))


@lru_cache(maxsize=256)
def _momenta(beta1: float, decay: float, step: int) -> float:
    """Return the product of the momenta of steps 1 to `step`, rounded to float32 after each, as PyTorch keeps it.

    Once it is below 2^-54 the rest changes nothing, because 1 minus it is 1.
    """
    product = f32(1)
    for each in range(1, step + 1):
        product *= f32(_momentum(beta1, decay, each))
        if product < 2.0**-54:
            return 0.0
    return float(product)
