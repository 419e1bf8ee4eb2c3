"""Optimizers as settings, which are stored with the job as JSON.

This module has only what a user chooses; `kvps.update_rules` computes the steps.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from kvps.errors import InvalidSetting
from kvps.schedules import SCHEDULES, Schedule, Setting, require

_T = TypeVar("_T", bound=Setting)


class Optimizer(Setting):
    """The rule by which the aggregator steps on a reduced gradient. `lr` is a number or a `Schedule`."""

    lr: float | Schedule

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.lr, Schedule):
            require(self.lr >= 0, f"{self.kind}: lr must not be negative, it is {self.lr}")
        if hasattr(self, "weight_decay"):
            require(self.weight_decay >= 0, f"{self.kind}: weight_decay must not be negative")

    @property
    def slots(self) -> tuple[str, ...]:
        """The names of the state arrays. Each is as large as the weights and begins as zeros."""
        raise NotImplementedError

    def lr_at(self, progress: float) -> float:
        """Return the learning rate after `progress` committed contributions per worker."""
        return self.lr.at(progress) if isinstance(self.lr, Schedule) else float(self.lr)


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
    def slots(self) -> tuple[str, ...]:
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
    def slots(self) -> tuple[str, ...]:
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
    def slots(self) -> tuple[str, ...]:
        return ("m", "v")


@dataclass(frozen=True)
class AdamW(Adam):
    """AdamW: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019."""

    weight_decay: float = 0.01
    kind: ClassVar[str] = "adamw"


OPTIMIZERS: dict[str, type[Optimizer]] = {c.kind: c for c in (SGD, Adagrad, Adam, AdamW)}


def from_json(value: dict[str, Any]) -> Optimizer:
    """Return the optimizer that `to_json` wrote. Raises InvalidSetting."""
    known = dict(value)
    kind = _optimizer(known.pop("kind", None))
    lr = known.get("lr")
    if isinstance(lr, dict):
        lr = dict(lr)
        name = lr.pop("kind", None)
        schedule = SCHEDULES.get(name)
        if schedule is None:
            raise InvalidSetting(f"schedule {name!r} is unknown: use one of {', '.join(SCHEDULES)}")
        known["lr"] = _build(schedule, lr)
    return _build(kind, known)


def parse(text: str, lr: float | None = None) -> Optimizer:
    """Return the optimizer of a command line: ``sgd`` or ``sgd:momentum=0.9,nesterov=true``. Raises InvalidSetting."""
    kind, colon, rest = text.partition(":")
    settings: dict[str, Any] = {} if lr is None else {"lr": lr}
    for part in rest.split(",") if colon else []:
        name, _, written = part.partition("=")
        try:
            value = json.loads(written)
        except ValueError:
            value = None
        if not name or not isinstance(value, int | float):
            raise InvalidSetting(f"optimizer {text!r}: write settings as name=number, as in sgd:momentum=0.9")
        if name in settings:
            raise InvalidSetting(f"optimizer {text!r}: {name} is given twice")
        settings[name] = value
    return _build(_optimizer(kind), settings)


def _optimizer(kind: object) -> type[Optimizer]:
    if not isinstance(kind, str) or kind not in OPTIMIZERS:
        raise InvalidSetting(f"optimizer {kind!r} is unknown: use one of {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[kind]


def _build(kind: type[_T], values: dict[str, Any]) -> _T:
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    allowed = [f.name for f in fields]
    for name in values:
        if name not in allowed:
            raise InvalidSetting(f"{kind.kind} has no setting {name!r}: it has {', '.join(allowed)}")
    if missing := [f.name for f in fields if f.default is dataclasses.MISSING and f.name not in values]:
        raise InvalidSetting(f"{kind.kind} needs {', '.join(missing)}")
    return kind(**values)
