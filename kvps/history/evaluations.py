"""Evaluations of a job's versions: figures, by name, that somebody has measured of the weights of one version."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from kvps.errors import InvalidName, InvalidSetting, shown
from kvps.parsing import LATEST_MS, NAME, NAME_IN_WORDS, Fields, matching, number, refuse

MOST_FIGURES = 32
_MOST_TEXT = 1 << 13  # characters of 32 figures as JSON
_BEST = re.compile(r"(?P<name>[^:]+)(:(?P<sense>min|max))?")


class Evaluation(NamedTuple):
    """The figures of one version.

    figures  name -> number, also NaN and infinite ones
    by       who has evaluated: evaluator, a worker's id, or host:pid
    at_ms    the server's time when the report came, in ms since 1970
    """

    version: int
    figures: dict[str, float]
    by: str
    at_ms: int

    @classmethod
    def of(cls, fields: Mapping[str, str], at_ms: int, where: str = "an evaluation") -> Evaluation:
        """Parse what Redis or a log has of it. Raises CorruptData."""
        f = Fields(fields, where)
        figures = Fields.of_json(f.text("figures", _MOST_TEXT), f"{where}: figures", _MOST_TEXT, deepest=1).as_dict()
        if len(figures) > MOST_FIGURES:
            refuse(f"{where}: figures", f"at most {MOST_FIGURES} of them", len(figures))
        parsed = {
            matching(name, f"{where}: the name of a figure", NAME, NAME_IN_WORDS): number(
                value, f"{where}: {name}", False
            )
            for name, value in figures.items()
        }
        return cls(f.whole("version"), parsed, f.text("by"), at_ms)

    @classmethod
    def stored(cls, fields: Mapping[str, str]) -> Evaluation:
        """Parse the newest one, as Redis has it. Raises CorruptData."""
        where = "the newest evaluation"
        return cls.of(fields, Fields(fields, where).whole("at_ms", high=LATEST_MS), where)

    @property
    def facts(self) -> dict[str, Any]:
        """Version, figures and who evaluated, as an event of the log has them."""
        return {"version": self.version, "figures": self.figures, "by": self.by}

    def __str__(self) -> str:
        return f"version {self.version:,}: {figures_text(self.figures)}"


def figures_text(figures: Mapping[str, float]) -> str:
    """Return figures for people, as in "loss 0.1234, accuracy 0.98"."""
    return ", ".join(f"{name} {value:.6g}" for name, value in figures.items())


def checked_figures(figures: Mapping[str, Any]) -> dict[str, float]:
    """Return what a user reports as floats. Raises InvalidSetting, InvalidName."""
    if not isinstance(figures, Mapping) or not 0 < len(figures) <= MOST_FIGURES:
        what = f"{len(figures)} of them" if isinstance(figures, Mapping) else shown(figures)
        raise InvalidSetting(f"figures must be a dict of 1 to {MOST_FIGURES} names and numbers, not {what}")
    return {_checked_name(name): _number(name, value) for name, value in figures.items()}


def _checked_name(name: Any) -> str:
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise InvalidName(f"the name of a figure {shown(name)} is not allowed: use {NAME_IN_WORDS}")
    return name


def _number(name: str, value: Any) -> float:
    """Return a number, or an array or tensor that holds one."""
    try:
        if not isinstance(value, str | bytes | bool):
            return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        pass
    raise InvalidSetting(f"figure {name!r} must be one number, not {shown(value)}")


def figures_json(figures: Mapping[str, float]) -> str:
    """Return figures as JSON; one that is not finite is a text there."""
    return json.dumps({name: value if math.isfinite(value) else str(value) for name, value in figures.items()})


class Wanted(NamedTuple):
    """Which figure says how good a version is, and whether more of it is better."""

    name: str
    more: bool

    @classmethod
    def parse(cls, text: str) -> Wanted:
        """Read "loss" or "loss:min", or "accuracy:max". Raises InvalidSetting."""
        match = _BEST.fullmatch(text)
        if not match or not NAME.fullmatch(match["name"]):
            raise InvalidSetting(f"the best version is that of a figure, as in loss or accuracy:max, not {text!r}")
        return cls(match["name"], match["sense"] == "max")

    def __str__(self) -> str:
        return f"{self.name}:{'max' if self.more else 'min'}"

    def of(self, figures: Mapping[str, float]) -> float:
        """Return the figure. Raises InvalidSetting if it is not there."""
        if self.name not in figures:
            raise InvalidSetting(
                f"the best version is that of {self.name!r}, which the evaluation does not have: it has "
                f"{', '.join(figures)}"
            )
        return figures[self.name]

    def better(self, new: float, old: float | None) -> bool:
        """Return whether a figure is better than the best before; None is no figure, and NaN or infinite is none."""
        if not math.isfinite(new):
            return False
        return old is None or (new > old if self.more else new < old)
