"""Schedules that are made of others, or of any numbers; and how every schedule is read."""

from __future__ import annotations

import base64
import struct
import zlib
from bisect import bisect_right
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, ClassVar

from kvps.errors import InvalidSetting, shown
from kvps.schedules.base import Schedule, build, is_number, require
from kvps.schedules.formulas import (
    CosineAnnealingLR,
    ExponentialLR,
    InverseSquareRootLR,
    InverseTimeLR,
    LinearLR,
    PolynomialLR,
    StepLR,
)

MOST_STEPS = 1 << 18
"""The most learning rates of a table."""
_MOST_SCHEDULES = 64


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
        require(self.every > 0, "table: every must be above 0 contributions per worker")

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
