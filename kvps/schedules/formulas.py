"""Schedules that are a formula of progress."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from kvps.schedules.base import Schedule, require


@dataclass(frozen=True)
class StepLR(Schedule):
    """``initial * factor ** floor(progress / every)``."""

    initial: float
    every: float
    factor: float = 0.1
    kind: ClassVar[str] = "step"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.every > 0, "step: every must be above 0 contributions per worker")
        require(self.factor >= 0, "step: factor must be 0 or more")

    def at(self, progress: float) -> float:
        steps = progress / self.every
        return _grown(self.initial, self.factor, math.floor(steps) if steps < math.inf else steps)


@dataclass(frozen=True)
class ExponentialLR(Schedule):
    """``initial * factor ** (progress / every)``."""

    initial: float
    every: float
    factor: float = 0.1
    kind: ClassVar[str] = "exponential"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.every > 0, "exponential: every must be above 0 contributions per worker")
        require(self.factor > 0, "exponential: factor must be above 0")

    def at(self, progress: float) -> float:
        return _grown(self.initial, self.factor, progress / self.every)


@dataclass(frozen=True)
class LinearLR(Schedule):
    """A straight line from `initial` to `final` over the first `over` contributions per worker; then `final`.

    With ``initial=0`` this is a warm-up.
    """

    initial: float
    final: float
    over: float
    kind: ClassVar[str] = "linear"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.over > 0, "linear: over must be above 0 contributions per worker")

    def at(self, progress: float) -> float:
        done = min(progress / self.over, 1.0)
        return self.initial + (self.final - self.initial) * done


@dataclass(frozen=True)
class CosineAnnealingLR(Schedule):
    """``final + (initial - final) * (1 + cos(pi * progress / over)) / 2``, then `final`.

    Loshchilov and Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts", 2017, without restarts.
    """

    initial: float
    over: float
    final: float = 0.0
    kind: ClassVar[str] = "cosine"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.over > 0, "cosine: over must be above 0 contributions per worker")

    def at(self, progress: float) -> float:
        done = min(progress / self.over, 1.0)
        return self.final + (self.initial - self.final) * (1 + math.cos(math.pi * done)) / 2


@dataclass(frozen=True)
class PolynomialLR(Schedule):
    """``final + (initial - final) * (1 - progress / over) ** power``, then `final`.

    `power` is 1 for a straight line. With ``final=0`` it is PyTorch's PolynomialLR.
    """

    initial: float
    over: float
    power: float = 1.0
    final: float = 0.0
    kind: ClassVar[str] = "polynomial"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.over > 0, "polynomial: over must be above 0 contributions per worker")
        require(self.power > 0, "polynomial: power must be above 0")

    def at(self, progress: float) -> float:
        left = 1.0 - min(progress / self.over, 1.0)
        return self.final + (self.initial - self.final) * math.pow(left, self.power)


@dataclass(frozen=True)
class InverseSquareRootLR(Schedule):
    """``initial / sqrt(1 + progress / over)``.

    Behind a warm-up of `over` contributions this is the schedule of Vaswani et al., "Attention Is All You Need", 2017:
    ``SequentialLR([LinearLR(0, lr, over), InverseSquareRootLR(lr, over)], milestones=[over])``.
    """

    initial: float
    over: float
    kind: ClassVar[str] = "inverse_square_root"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.over > 0, "inverse_square_root: over must be above 0 contributions per worker")

    def at(self, progress: float) -> float:
        return self.initial / math.sqrt(1 + progress / self.over)


@dataclass(frozen=True)
class InverseTimeLR(Schedule):
    """``initial / (1 + progress / over)``: Robbins and Monro, "A Stochastic Approximation Method", 1951."""

    initial: float
    over: float
    kind: ClassVar[str] = "inverse_time"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.over > 0, "inverse_time: over must be above 0 contributions per worker")

    def at(self, progress: float) -> float:
        return self.initial / (1 + progress / self.over)


def _grown(initial: float, factor: float, steps: float) -> float:
    """Return ``initial * factor ** steps``; what is too large for a float is infinite."""
    try:
        grown: float = float(factor) ** float(steps)
    except OverflowError:
        grown = math.inf
    return float(initial) * grown if initial else 0.0
