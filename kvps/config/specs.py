"""What a setting may be: its description, and why a value is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from typing import Any

from kvps import optim
from kvps.arrays.formats import known_format
from kvps.errors import CorruptData, InvalidSetting, shown
from kvps.machine.launcher import Launcher
from kvps.parsing import MOST_TEXT

MOST_OPTIMIZER = 1 << 22
"""The most characters of an optimizer as JSON: thousands of names in groups, and tables of learning rates."""

REPLICATED = "replicated"
_DURABILITY = re.compile(rf"memory|{REPLICATED}(:[1-9][0-9]?)?")
_NUMBER = re.compile(r"[0-9]{1,9}(\.[0-9]{1,20})?(e-[0-9]{1,2})?")  # as `repr` writes a float
_MOST_NUMBER = 999_999_999
_LEAST_STRENGTH = 1e-9  # of what is not zero: less would be lost in float32


@dataclass(frozen=True)
class Spec:
    """The description of a setting. `table_of` adds its name, its default, and its type as that of a keyword.

    help     what the setting decides
    bounds   the smallest and the largest whole number allowed
    choices  the words allowed
    why_not  for other kinds of values: returns why a value is refused, as the end of a sentence; "" if it is allowed
    parse    or what reads such a value, and raises InvalidSetting in a line that begins with the setting's name
    read     for a number: returns the value of a text from Redis or a command line; a text that is none, as it is
    group    the heading under which a help text lists the setting; "" for a setting that has no option, because only
             Python code or kvps sets it
    option   the options on a command line, long one first: --NAME, unless the table says another. A setting whose name
             ends in _ms, for milliseconds, is given in seconds there, without that ending
    metavar  the placeholder that a help text shows after the option
    """

    help: str
    bounds: tuple[int, int] | None = None
    choices: tuple[str, ...] = ()
    why_not: Callable[[Any], str] | None = None
    parse: Callable[[Any], Any] | None = None
    read: Callable[[str], Any] | None = None
    group: str = ""
    option: tuple[str, ...] = ()
    metavar: str = ""
    name: str = ""
    type: str = ""
    default: Any = None

    def why_refused(self, value: Any) -> str:
        """Return why the setting may not have this value, as the end of a sentence after its name; "" if it may."""
        if self.bounds:
            low, high = self.bounds
            fits = isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
            return "" if fits else f"must be a whole number from {low} to {high}, not {shown(value)}"
        if self.choices:
            fits = isinstance(value, str) and value in self.choices
            return "" if fits else f"must be one of {', '.join(self.choices)}, not {shown(value)}"
        return (self.why_not or not_a_text)(value)

    def check(self, value: Any) -> None:
        """Raise InvalidSetting if the setting may not have this value."""
        if self.parse:
            self.parse(value)
        elif why := self.why_refused(value):
            raise InvalidSetting(f"{self.name} {why}")


def setting(default: Any, help: str, **known: Any) -> Any:
    """Return a field of the table."""
    return field(default=default, metadata=described(help, **known))


def described(help: str, **known: Any) -> dict[str, Any]:
    """Return the metadata of such a field."""
    return {"spec": Spec(help, **known)}


def table_of(kind: type) -> dict[str, Spec]:
    """Return the description of each setting that is a field of this dataclass, by its name."""
    return {f.name: _completed(f) for f in fields(kind) if "spec" in f.metadata}


def _completed(f: Field[Any]) -> Spec:
    spec: Spec = f.metadata["spec"]
    option = spec.option
    if spec.group and not option:
        option = ("--" + f.name.removesuffix("_ms").replace("_", "-"),)
    default = f.default if f.default_factory is MISSING else f.default_factory()
    kind = f"{f.type} | str" if isinstance(default, optim.Optimizer) else str(f.type)  # as on a command line
    return replace(spec, name=f.name, type=kind, default=default, option=option)


def not_an_optimizer(value: object) -> str:
    if isinstance(value, optim.Optimizer):
        if (size := len(as_text(value))) <= MOST_OPTIMIZER:
            return ""
        return f"is {size} characters as JSON, at most {MOST_OPTIMIZER} are allowed: shorten groups or tables"
    kind = type(value)
    return (
        f"must be a kvps optimizer such as kvps.SGD(...), not a {kind.__module__}.{kind.__name__}; "
        f"kvps.torch.optimizer(...) converts a PyTorch optimizer"
    )


def as_text(value: object) -> str:
    """Return a setting's value as the text of a field of the config hash, or of an option."""
    if isinstance(value, optim.Optimizer):
        return json.dumps(value.to_json())
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return "" if value is None else str(value)


def read_number(text: str) -> float | str:
    """Return the number that a text is, or the text."""
    return float(text) if _NUMBER.fullmatch(text) else text


def read_optional(text: str) -> float | str | None:
    """Return the number that a text is, None for "", or the text."""
    return read_number(text) if text else None


def _is_number(value: object, least: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= _MOST_NUMBER


def not_a_weight_format(value: object) -> str:
    fits = value != "fp16" and known_format(value)
    return "" if fits else f"must be one of fp32, bf16, int8, topk:PART with a PART up to 1, not {shown(value)}"


def not_a_factor(value: object) -> str:
    fits = value is None or _is_number(value, 1)
    return "" if fits else f"must be a number from 1, as 10 or 2.5, not {shown(value)}"


def not_a_strength(value: object) -> str:
    if _is_number(value, _LEAST_STRENGTH) or (value == 0 and _is_number(value, 0)):
        return ""
    return f"must be 0, or a number from {_LEAST_STRENGTH} to {_MOST_NUMBER}, as 0.04, not {shown(value)}"


def not_a_durability(value: object) -> str:
    fits = isinstance(value, str) and _DURABILITY.fullmatch(value)
    return "" if fits else f"must be memory, replicated or replicated:N with a number of replicas, not {shown(value)}"


def not_a_launcher(value: object) -> str:
    try:
        fits = isinstance(value, str) and (not value or bool(Launcher.of(value)))
    except CorruptData:
        fits = False
    return "" if fits else f"may only be set by kvps up and kvps run, not to {shown(value)}"


def not_a_text(value: object) -> str:
    fits = isinstance(value, str) and len(value) <= MOST_TEXT and value.isprintable()
    return "" if fits else f"must be printable text of at most {MOST_TEXT} characters, not {shown(value)}"
