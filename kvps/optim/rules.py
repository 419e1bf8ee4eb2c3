"""The rules by which weights step: PyTorch's names, defaults and formulas."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from kvps.errors import shown
from kvps.optim.optimizer import Optimizer
from kvps.optim.schedules import Schedule
from kvps.optim.settings import require

_MOST_EVERY = 1_000_000


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


@dataclass(frozen=True)
class Adagrad(Optimizer):
    """Adagrad as in PyTorch: Duchi, Hazan and Singer, "Adaptive Subgradient Methods", JMLR 2011."""

    lr: float | Schedule = 0.01
    eps: float = 1e-10
    weight_decay: float = 0.0
    lr_decay: float = 0.0
    kind: ClassVar[str] = "adagrad"
    own_slots = ("sum",)

    @property
    def counts_steps(self) -> bool:
        return self.lr_decay > 0


@dataclass(frozen=True)
class Adadelta(Optimizer):
    """Adadelta as in PyTorch: Zeiler, "ADADELTA: An Adaptive Learning Rate Method", 2012."""

    lr: float | Schedule = 1.0
    rho: float = 0.9
    eps: float = 1e-6
    weight_decay: float = 0.0
    kind: ClassVar[str] = "adadelta"
    own_slots = ("square", "delta")

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.rho <= 1, f"adadelta: rho must be in [0, 1], it is {self.rho}")


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

    @property
    def own_slots(self) -> tuple[str, ...]:
        return ("square", *["mean"] * self.centered, *["momentum"] * (self.momentum > 0))


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
    counts_steps = True

    @property
    def own_slots(self) -> tuple[str, ...]:
        return ("m", "v", *["vmax"] * self.amsgrad)


@dataclass(frozen=True)
class AdamW(Adam):
    """AdamW: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019."""

    weight_decay: float = 0.01
    kind: ClassVar[str] = "adamw"


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
    own_slots = ("m", "v")
    counts_steps = True


@dataclass(frozen=True)
class Adamax(Optimizer):
    """Adamax, which divides by the largest gradient: Kingma and Ba, 2015, algorithm 2."""

    lr: float | Schedule = 0.002
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    kind: ClassVar[str] = "adamax"
    own_slots = ("m", "u")
    counts_steps = True


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
    own_slots = ("m",)


@dataclass(frozen=True)
class Yogi(Optimizer):
    """Yogi, whose second moment grows and shrinks by a part of g*g alone: Zaheer et al., "Adaptive Methods for
    Nonconvex Optimization", NeurIPS 2018, algorithm 2.

    As the outer optimizer of local steps it is FedYogi (Reddi et al., "Adaptive Federated Optimization", 2021). Both
    moments begin as zeros, and neither is corrected for that; `eps` bounds the first steps. weight_decay adds to the
    gradient.
    """

    lr: float | Schedule = 0.01
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-3
    weight_decay: float = 0.0
    kind: ClassVar[str] = "yogi"
    own_slots = ("m", "v")


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
    own_slots = ("momentum", "buffer")
    counts_steps = True

    def __post_init__(self) -> None:
        super().__post_init__()
        fits = isinstance(self.every, int) and not isinstance(self.every, bool) and 1 <= self.every <= _MOST_EVERY
        require(
            fits, f"delayed-nesterov: every must be a whole number from 1 to {_MOST_EVERY}, not {shown(self.every)}"
        )
        require(0 <= self.c <= 1 / self.every, f"delayed-nesterov: c must be from 0 to 1/every, it is {self.c}")


_ALL = (SGD, Adagrad, Adadelta, RMSprop, Adam, AdamW, NAdam, Adamax, Lion, Yogi, DelayedNesterov)
OPTIMIZERS: dict[str, type[Optimizer]] = {c.kind: c for c in _ALL}
