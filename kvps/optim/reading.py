"""Reads an optimizer from JSON, as Redis holds it, and from a command line."""

from __future__ import annotations

import json
import re
from difflib import get_close_matches
from typing import Any

from kvps.errors import InvalidSetting, shown
from kvps.optim import schedules, user_code
from kvps.optim.custom import CustomOptimizer
from kvps.optim.optimizer import MOST_GROUPS, OPTIMIZERS, Optimizer, ParameterGroup
from kvps.optim.settings import build, require

_COMMON = ("lr", "maximize", "clip_norm")  # what a command line may set of every optimizer
_OWN = re.compile(rf"{user_code.NAME.pattern}(?=:|\Z)")


def from_json(value: dict[str, Any]) -> Optimizer:
    """Return the optimizer that `to_json` wrote. Raises InvalidSetting."""
    known = dict(value)
    kind = known.pop("kind", None)
    chosen = CustomOptimizer if kind == CustomOptimizer.kind else _optimizer(kind)
    groups = known.pop("groups", [])
    require(isinstance(groups, list) and len(groups) <= MOST_GROUPS, f"groups must be a list of at most {MOST_GROUPS}")
    return build(chosen, _settings(known) | {"groups": tuple(map(_group, groups))})


def _group(value: Any) -> ParameterGroup:
    require(isinstance(value, dict) and isinstance(value.get("names"), list), "a group must be an object with names")
    known = dict(value)
    return ParameterGroup(known.pop("names"), **_settings(known))


def _settings(values: dict[str, Any]) -> dict[str, Any]:
    """Return them with a Schedule in place of the object that describes one."""
    rate = values.get("lr")
    return values | ({"lr": schedules.from_json(rate)} if isinstance(rate, dict) else {})


def parse(text: str, lr: float | None = None) -> Optimizer:
    """Return the optimizer of a command line: ``sgd`` or ``sgd:momentum=0.9,nesterov=true``. One of the user's own is
    ``module:Class`` or ``module:Class:mu=0.9``, and is imported. Raises InvalidSetting."""
    kind, colon, rest = text.partition(":")
    if kind not in OPTIMIZERS and (own := _OWN.match(text)):
        kind, colon, rest = own[0], text[own.end() : own.end() + 1], text[own.end() + 1 :]
    settings = _numbers(text, rest if colon else None, {} if lr is None else {"lr": lr})
    if ":" not in kind:
        return build(_optimizer(kind), settings)
    require("lr" in settings, f"optimizer {text!r} needs a learning rate: add lr=NUMBER")
    common = {name: settings.pop(name) for name in _COMMON if name in settings}
    return CustomOptimizer(name=kind, numbers=tuple(settings.items()), **common).with_slots()


def _numbers(text: str, written: str | None, known: dict[str, Any]) -> dict[str, Any]:
    """Return `known` and what ``name=number,...`` sets."""
    settings = dict(known)
    for part in written.split(",") if written is not None else []:
        name, _, number = part.partition("=")
        try:
            value = json.loads(number)
        except ValueError:
            value = None
        if not name or not isinstance(value, int | float):
            raise InvalidSetting(f"optimizer {text!r}: write settings as name=number, as in sgd:momentum=0.9")
        if name in settings:
            raise InvalidSetting(f"optimizer {text!r}: {name} is given twice")
        settings[name] = value
    return settings


def _optimizer(kind: object) -> type[Optimizer]:
    if not isinstance(kind, str) or kind not in OPTIMIZERS:
        near = "".join(f"did you mean {name}? " for name in get_close_matches(str(kind), OPTIMIZERS, 1))
        known = ", ".join(OPTIMIZERS)
        raise InvalidSetting(
            f"optimizer {shown(kind)} is unknown: {near}use one of {known}, or your own as module:Class"
        )
    return OPTIMIZERS[kind]
