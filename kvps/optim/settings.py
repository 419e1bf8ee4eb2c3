"""What optimizers and schedules are made of: settings that are checked, and written to and read from JSON."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any, ClassVar, TypeVar

from kvps.errors import InvalidSetting, shown

_T = TypeVar("_T", bound="Setting")
# The range of a number goes with its name, whichever optimizer or schedule has it.
_NOT_NEGATIVE = {"lr", "clip_norm", "weight_decay", "lr_decay", "momentum_decay", "initial", "final"}
_ABOVE_ZERO = {"eps", "every", "over", "power"}
_BELOW_ONE = {"momentum", "alpha", "beta1", "beta2"}


def require(ok: bool, message: str) -> None:
    if not ok:
        raise InvalidSetting(message)


def is_number(value: object) -> bool:
    # Not math.isfinite: it raises OverflowError for an int that is too large for a float.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


class Setting:
    """The base of optimizers and schedules: a `kind`, a check of every number and its range, and conversion to JSON."""

    kind: ClassVar[str]

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, f.name)
            if f.type == "bool":
                require(isinstance(value, bool), f"{self.kind}: {f.name} must be true or false, not {shown(value)}")
            elif f.type.startswith("float") and not ("Schedule" in f.type and isinstance(value, Setting)):
                self._check_number(f.name, value)

    def _check_number(self, name: str, value: Any) -> None:
        what = f"{self.kind}: {name} must"
        require(is_number(value), f"{what} be a finite number, not {shown(value)}")
        require(value >= 0 or name not in _NOT_NEGATIVE, f"{what} not be negative, it is {value}")
        require(value > 0 or name not in _ABOVE_ZERO, f"{what} be above 0, it is {value}")
        require(0 <= value < 1 or name not in _BELOW_ONE, f"{what} be in [0, 1), it is {value}")

    def to_json(self) -> dict[str, Any]:
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}  # type: ignore[arg-type]
        return {"kind": self.kind} | {k: v.to_json() if isinstance(v, Setting) else v for k, v in values.items()}

    def __str__(self) -> str:
        return f"{self.kind}({', '.join(self.in_words())})"

    def beside(self, other: Setting) -> str:
        """Return it in words, for a message that has `other` too: if both read the same, it says what differs."""
        if str(self) != str(other):
            return str(self)
        names = (f.name for f in dataclasses.fields(self))  # type: ignore[arg-type]
        return f"{self} with other {', '.join(n for n in names if getattr(self, n) != getattr(other, n))}"

    def in_words(self) -> list[str]:
        """Return NAME=VALUE of each setting that is not at its default, and of the learning rate."""
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        return [
            f"{f.name}={getattr(self, f.name)}" for f in fields if f.name == "lr" or getattr(self, f.name) != f.default
        ]


def build(kind: type[_T], values: dict[str, Any]) -> _T:
    """Return a setting of this kind. Raises InvalidSetting for a field that it does not have, or that is missing."""
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    allowed = [f.name for f in fields]
    for name in values:
        if name not in allowed:
            raise InvalidSetting(f"{kind.kind} has no setting {shown(name)}: it has {', '.join(allowed)}")
    if missing := [f.name for f in fields if f.default is dataclasses.MISSING and f.name not in values]:
        raise InvalidSetting(f"{kind.kind} needs {', '.join(missing)}")
    return kind(**values)
