"""Learning-rate schedules, named as PyTorch names them.

They run over *progress*: committed contributions per worker (the sum of the vector clock / workers), so that a schedule
means the same in BSP, SSP and ASP.
"""

from __future__ import annotations

import base64
import math
import struct
import zlib
from bisect import bisect_right
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, ClassVar

from kvps.errors import InvalidSetting, shown
from kvps.optim.settings import Setting, build, is_number, require

MOST_STEPS = 1 << 18
"""The most learning rates of a table."""
_MOST_SCHEDULES = 64


class Schedule(Setting):
    """A learning rate that changes with progress."""

    @classmethod
    def of_json(cls, values: dict[str, Any]) -> Schedule:
        """Return the schedule of which `to_json` wrote these fields beside its kind. Raises InvalidSetting."""
        return build(cls, values)

    def at(self, progress: float) -> float:
        """Return the learning rate after `progress` committed contributions per worker."""
        raise NotImplementedError

    @property
    def highest(self) -> float:
        """The highest learning rate; of one that may grow for ever, that with which it begins."""
        return max(float(getattr(self, name)) for name in ("initial", "final") if hasattr(self, name))


@dataclass(frozen=True)
class StepLR(Schedule):
    """``initial * factor ** floor(progress / every)``."""

    initial: float
    every: float
    factor: float = 0.1
    kind: ClassVar[str] = "step"

    def __post_init__(self) -> None:
        super().__post_init__()
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

    def at(self, progress: float) -> float:
        return self.initial / math.sqrt(1 + progress / self.over)


@dataclass(frozen=True)
class InverseTimeLR(Schedule):
    """``initial / (1 + progress / over)``: Robbins and Monro, "A Stochastic Approximation Method", 1951."""

    initial: float
    over: float
    kind: ClassVar[str] = "inverse_time"

    def at(self, progress: float) -> float:
        return self.initial / (1 + progress / self.over)


@dataclass(frozen=True)
class SequentialLR(Schedule):
    """One schedule after the other: the next one begins, at its own beginning, at each of the milestones.

    A warm-up, then cosine: ``SequentialLR([LinearLR(0, 0.5, 100), CosineAnnealingLR(0.5, 900)], milestones=[100])``.
    """

    schedules: tuple[Schedule, ...]
    milestones: tuple[float, ...]
    kind: ClassVar[str] = "sequential"

    def __post_init__(self) -> None:
        for name, wanted in (("schedules", "schedules"), ("milestones", "numbers")):
            require(isinstance(getattr(self, name), list | tuple), f"sequential: {name} must be a list of {wanted}")
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for each in self.schedules:
            fits = isinstance(each, Schedule) and not isinstance(each, SequentialLR)
            require(fits, "sequential: each of schedules must be one of kvps.schedules, and no SequentialLR")
        count = len(self.schedules)
        require(
            1 <= count <= _MOST_SCHEDULES, f"sequential: there must be 1 to {_MOST_SCHEDULES} schedules, not {count}"
        )
        require(len(self.milestones) == count - 1, "sequential: there must be a milestone between any two schedules")
        numbers = [0.0, *self.milestones]
        rising = all(map(is_number, numbers)) and all(a < b for a, b in pairwise(numbers))
        require(rising, "sequential: milestones must be numbers above 0, each above the one before")

    def at(self, progress: float) -> float:
        number = bisect_right(self.milestones, progress)
        return self.schedules[number].at(progress - (self.milestones[number - 1] if number else 0.0))

    @property
    def highest(self) -> float:
        return max(each.highest for each in self.schedules)

    def to_json(self) -> dict[str, Any]:
        schedules = [each.to_json() for each in self.schedules]
        return {"kind": self.kind, "schedules": schedules, "milestones": list(self.milestones)}

    @classmethod
    def of_json(cls, values: dict[str, Any]) -> Schedule:
        schedules = values.get("schedules")
        if not isinstance(schedules, list):
            raise InvalidSetting("sequential: schedules must be a list of schedules")
        return build(cls, values | {"schedules": tuple(map(from_json, schedules))})

    def in_words(self) -> list[str]:
        return [*map(str, self.schedules), f"milestones={list(self.milestones)}"]


@dataclass(frozen=True)
class TableLR(Schedule):
    """``values[floor(progress / every)]``, and the last of them from then on: any function of the step.

    In JSON the values are float64 in little-endian order, compressed by zlib, in base64: no bit is lost, and one of
    100,000 steps takes 1 MB at the most.
    """

    values: tuple[float, ...] = field(repr=False)
    every: float = 1
    kind: ClassVar[str] = "table"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(isinstance(self.values, list | tuple), "table: values must be a list of numbers")
        count = len(self.values)
        require(1 <= count <= MOST_STEPS, f"table: there must be 1 to {MOST_STEPS} values, not {count}")
        require(all(map(is_number, self.values)), "table: values must be finite numbers")
        require(min(self.values) >= 0, f"table: values must not be negative, one is {min(self.values)}")
        object.__setattr__(self, "values", tuple(map(float, self.values)))

    @cached_property
    def highest(self) -> float:
        return max(self.values)

    def at(self, progress: float) -> float:
        return self.values[int(min(progress / self.every, len(self.values) - 1))]

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "every": self.every, "steps": len(self.values), "values": self._packed}

    @classmethod
    def of_json(cls, values: dict[str, Any]) -> Schedule:
        steps = values.get("steps")
        fits = type(steps) is int and 1 <= steps <= MOST_STEPS
        require(fits, f"table: steps must be a whole number from 1 to {MOST_STEPS}")
        known = {name: value for name, value in values.items() if name != "steps"}
        return build(cls, known | {"values": _unpacked(values.get("values"), int(steps or 0))})

    def in_words(self) -> list[str]:
        shown = [f"steps={len(self.values)}", f"first={self.values[0]}", f"last={self.values[-1]}"]
        return shown + ([f"every={self.every}"] if self.every != 1 else [])

    @cached_property
    def _packed(self) -> str:
        data = struct.pack(f"<{len(self.values)}d", *self.values)
        return base64.b64encode(zlib.compress(data, 9)).decode()


def _grown(initial: float, factor: float, steps: float) -> float:
    """Return ``initial * factor ** steps``; what is too large for a float is infinite."""
    try:
        grown: float = float(factor) ** float(steps)
    except OverflowError:
        grown = math.inf
    return float(initial) * grown if initial else 0.0


def _unpacked(text: object, count: int) -> tuple[float, ...]:
    """Return the `count` numbers that `TableLR` packed. Raises InvalidSetting; never unpacks more than those."""
    size = 8 * count
    unpacker = zlib.decompressobj()
    try:
        data = unpacker.decompress(base64.b64decode(text, validate=True) if isinstance(text, str) else b"", size + 1)
    except (ValueError, zlib.error):
        data = b""
    require(len(data) == size and unpacker.eof, f"table: values must be {count} float64, compressed by zlib, in base64")
    return struct.unpack(f"<{count}d", data)


_ALL = (StepLR, ExponentialLR, LinearLR, CosineAnnealingLR, PolynomialLR, InverseSquareRootLR, InverseTimeLR)
SCHEDULES: dict[str, type[Schedule]] = {c.kind: c for c in (*_ALL, SequentialLR, TableLR)}


def from_json(value: Any) -> Schedule:
    """Return the schedule that `to_json` wrote. Raises InvalidSetting."""
    require(isinstance(value, dict), "a schedule must be an object with a kind")
    known = dict(value)
    kind = known.pop("kind", None)
    if not isinstance(kind, str) or kind not in SCHEDULES:
        raise InvalidSetting(f"schedule {shown(kind)} is unknown: use one of {', '.join(SCHEDULES)}")
    return SCHEDULES[kind].of_json(known)
