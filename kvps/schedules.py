"""Learning-rate schedules, named as PyTorch names them.

They run over *progress*: committed contributions per worker (the sum of the vector clock / workers), so that a schedule
means the same in BSP, SSP and ASP.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from kvps.errors import InvalidSetting

_T = TypeVar("_T", bound="Setting")


def require(ok: bool, message: str) -> None:
    if not ok:
        raise InvalidSetting(message)


def _is_number(value: object) -> bool:
    # Not math.isfinite: it raises OverflowError for an int that is too large for a float.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


class Setting:
    """The base of optimizers and schedules: a `kind`, a check of every number, and conversion to JSON."""

    kind: ClassVar[str]

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if field.type == "bool":
                require(isinstance(value, bool), f"{self.kind}: {field.name} must be true or false, not {value!r}")
            elif "float" in field.type and not ("Schedule" in field.type and isinstance(value, Schedule)):
                require(_is_number(value), f"{self.kind}: {field.name} must be a finite number, not {value!r}")

    def to_json(self) -> dict[str, Any]:
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}  # type: ignore[arg-type]
        return {"kind": self.kind} | {k: v.to_json() if isinstance(v, Setting) else v for k, v in values.items()}

    def __str__(self) -> str:
        return f"{self.kind}({', '.join(self.in_words())})"

    def in_words(self) -> list[str]:
        """Return NAME=VALUE of each setting that is not at its default, and of the learning rate."""
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        return [
            f"{f.name}={getattr(self, f.name)}" for f in fields if f.name == "lr" or getattr(self, f.name) != f.default
        ]


class Schedule(Setting):
    """A learning rate that changes with progress."""

    def at(self, progress: float) -> float:
        """Return the learning rate after `progress` committed contributions per worker."""
        raise NotImplementedError


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


def _grown(initial: float, factor: float, steps: float) -> float:
    """Return ``initial * factor ** steps``; what is too large for a float is infinite."""
    try:
        grown: float = float(factor) ** float(steps)
    except OverflowError:
        grown = math.inf
    return float(initial) * grown if initial else 0.0


SCHEDULES: dict[str, type[Schedule]] = {c.kind: c for c in (StepLR, ExponentialLR, LinearLR, CosineAnnealingLR)}


def from_json(value: Any) -> Schedule:
    """Return the schedule that `to_json` wrote. Raises InvalidSetting."""
    require(isinstance(value, dict), "a schedule must be an object with a kind")
    known = dict(value)
    kind = known.pop("kind", None)
    if not isinstance(kind, str) or kind not in SCHEDULES:
        raise InvalidSetting(f"schedule {kind!r} is unknown: use one of {', '.join(SCHEDULES)}")
    return build(SCHEDULES[kind], known)


def build(kind: type[_T], values: dict[str, Any]) -> _T:
    """Return a setting of this kind. Raises InvalidSetting for a field that it does not have, or that is missing."""
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    allowed = [f.name for f in fields]
    for name in values:
        if name not in allowed:
            raise InvalidSetting(f"{kind.kind} has no setting {name!r}: it has {', '.join(allowed)}")
    if missing := [f.name for f in fields if f.default is dataclasses.MISSING and f.name not in values]:
        raise InvalidSetting(f"{kind.kind} needs {', '.join(missing)}")
    return kind(**values)
