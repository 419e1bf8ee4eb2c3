"""Reads an optimizer from JSON, as Redis holds it, and from a command line."""

from __future__ import annotations

import json
from typing import Any

from kvps import schedules
from kvps.errors import InvalidSetting
from kvps.optimizers.base import MOST_GROUPS, Optimizer, ParameterGroup
from kvps.optimizers.rules import OPTIMIZERS
from kvps.schedules.base import build, require, shown


def from_json(value: dict[str, Any]) -> Optimizer:
    """Return the optimizer that `to_json` wrote. Raises InvalidSetting."""
    known = dict(value)
    kind = _optimizer(known.pop("kind", None))
    groups = known.pop("groups", [])
    require(isinstance(groups, list) and len(groups) <= MOST_GROUPS, f"groups must be a list of at most {MOST_GROUPS}")
    return build(kind, _settings(known) | {"groups": tuple(map(_group, groups))})


def _group(value: Any) -> ParameterGroup:
    require(isinstance(value, dict) and isinstance(value.get("names"), list), "a group must be an object with names")
    known = dict(value)
    return ParameterGroup(known.pop("names"), **_settings(known))


def _settings(values: dict[str, Any]) -> dict[str, Any]:
    """Return them with a Schedule in place of the object that describes one."""
    rate = values.get("lr")
    return values | ({"lr": schedules.from_json(rate)} if isinstance(rate, dict) else {})


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
    return build(_optimizer(kind), settings)


def _optimizer(kind: object) -> type[Optimizer]:
    if not isinstance(kind, str) or kind not in OPTIMIZERS:
        raise InvalidSetting(f"optimizer {shown(kind)} is unknown: use one of {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[kind]
