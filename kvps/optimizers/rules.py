"""The rules by which weights step: PyTorch's names, defaults and formulas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvps.optimizers.base import Optimizer
from kvps.schedules import Schedule
from kvps.schedules.base import require


@dataclass(frozen=True)
class SGD(Optimizer):
    """Stochastic gradient descent, with momentum, Nesterov's momentum and L2 weight decay as in PyTorch."""

    lr: float | Schedule = 0.1
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    kind: ClassVar[str] = "sgd"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.momentum < 1, f"sgd: momentum must be in [0, 1), it is {self.momentum}")
        require(self.momentum > 0 or not self.nesterov, "sgd: nesterov needs a momentum above 0")

    @property
    def own_slots(self) -> tuple[str, ...]:
        return ("momentum",) if self.momentum else ()


@dataclass(frozen=True)
class Adagrad(Optimizer):
    """Adagrad as in PyTorch: Duchi, Hazan and Singer, "Adaptive Subgradient Methods", JMLR 2011."""

    lr: float | Schedule = 0.01
    eps: float = 1e-10
    weight_decay: float = 0.0
    kind: ClassVar[str] = "adagrad"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.eps > 0, "adagrad: eps must be above 0")

    @property
    def own_slots(self) -> tuple[str, ...]:
        return ("sum",)


@dataclass(frozen=True)
class Adam(Optimizer):
    """Adam: Kingma and Ba, "Adam: A Method for Stochastic Optimization", 2015; weight decay adds to the gradient."""

    lr: float | Schedule = 0.001
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    kind: ClassVar[str] = "adam"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("beta1", "beta2"):
            require(0 <= getattr(self, name) < 1, f"{self.kind}: {name} must be in [0, 1)")
        require(self.eps > 0, f"{self.kind}: eps must be above 0")

    @property
    def own_slots(self) -> tuple[str, ...]:
        return ("m", "v")


@dataclass(frozen=True)
class AdamW(Adam):
    """AdamW: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019."""

    weight_decay: float = 0.01
    kind: ClassVar[str] = "adamw"


OPTIMIZERS: dict[str, type[Optimizer]] = {c.kind: c for c in (SGD, Adagrad, Adam, AdamW)}
