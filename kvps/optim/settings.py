"""What optimizers and schedules are made of: settings that are checked, and written to and read from JSON."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any, ClassVar, TypeVar

from kvps.errors import InvalidSetting, shown

_T = TypeVar("_T", bound="Setting")


def require(ok: bool, message: str) -> None:
    if not ok:
        raise InvalidSetting(message)


def is_number(value: object) -> bool:
    # Not math.isfinite: it raises OverflowError for an int that is too large for a float.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


class Setting:
    """The base of optimizers and schedules: a `kind`, a check of every number, and conversion to JSON."""

    kind: ClassVar[str]

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, f.name)
            if f.type == "bool":
                require(isinstance(value, bool), f"{self.kind}: {f.name} must be true or false, not {shown(value)}")
            elif f.type.startswith("float") and not ("Schedule" in f.type and isinstance(value, Setting)):
                require(is_number(value), f"{self.kind}: {f.name} must be a finite number, not {shown(value)}")

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
