"""How the contributions of a version become one gradient, as a setting of a job.

This module has only what a user chooses; `kvps_aggregator.step.reduce` computes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from operator import index
from typing import Any, NamedTuple, SupportsIndex

from kvps.errors import InvalidSetting, shown
from kvps.optim import user_code
from kvps.parsing import MOST_TEXT

PLAIN = ("mean", "sum", "weighted", "median")
MOST_WEIGHT = 2**31
"""The greatest weight of a contribution."""
_PART = re.compile(r"0?\.[0-9]{1,6}")


class Reduction(NamedTuple):
    """A reduction: its kind, for `trimmed` the part of the values that is left out at each end, and for `custom` the
    name of the user's function."""

    kind: str
    part: float = 0.0
    name: str = ""

    @property
    def is_ordered(self) -> bool:
        """Whether it needs all contributions at once, to sort their values."""
        return self.kind in ("median", "trimmed")

    @property
    def takes_weights(self) -> bool:
        """Whether contributions may have weights other than 1; `push.lua` knows it too."""
        return self.kind in ("weighted", "custom")


def parse(text: object) -> Reduction:
    """Return the reduction that a setting names: mean, sum, weighted, median, trimmed:PART or module:function.

    Nothing is imported. Raises InvalidSetting.
    """
    if isinstance(text, str):
        if text in PLAIN:
            return Reduction(text)
        kind, _, part = text.partition(":")
        if kind == "trimmed" and _PART.fullmatch(part) and 0 < float(part) < 0.5:
            return Reduction(kind, float(part))
        if kind != "trimmed" and len(text) <= MOST_TEXT and user_code.NAME.fullmatch(text):
            return Reduction("custom", name=text)
    raise InvalidSetting(
        f"reduction must be one of {', '.join(PLAIN)}, or trimmed:PART with a PART above 0 and below 0.5, or "
        f"module:function for one of your own, not {shown(text)}"
    )


Function = Callable[[list[Any], Sequence[int], Any, Any], object]
"""A reduction of the user's own: ``function(contributions, weights, out, xp)`` fills `out`.

contributions  a list of one or more (n,) float32 arrays of the module `xp`, in rank order; they may be overwritten
weights        the whole number that each was pushed with, 1 if the worker gave none
out            (n,) float32

n is any stretch of the parameters: each item may depend on the same item of the contributions alone.
"""


def custom(name: str) -> Function:
    """Return the user's function of that name, from the current directory. Raises InvalidSetting, as its errors do."""
    function = user_code.load("reduction", name, InvalidSetting)
    if not callable(function) or isinstance(function, type):
        raise InvalidSetting(f"reduction {name!r} is no function")

    def reduce(contributions: list[Any], weights: Sequence[int], out: Any, xp: Any) -> None:
        with user_code.blamed("reduction", name, InvalidSetting):
            function(contributions, weights, out, xp)

    return reduce


SCALINGS: dict[str, Callable[[int], float]] = {
    "none": lambda staleness: 1.0,
    "inverse": lambda staleness: 1 / (1 + staleness),
    "inverse-sqrt": lambda staleness: 1 / math.sqrt(1 + staleness),
}
"""What a contribution is multiplied by, if so many versions were made since the one that it was computed on."""


def check_weight(weight: object, reduction: str) -> int:
    """Return a contribution's weight, 1 for None. Raises InvalidSetting unless a job of this reduction takes it."""
    if weight is None:
        return 1
    if not parse(reduction).takes_weights:
        raise InvalidSetting(
            f"weight is for jobs with the reduction weighted, and this job's is {reduction}: leave it out, or create "
            f"the job with reduction='weighted'"
        )
    if isinstance(weight, bool) or not isinstance(weight, SupportsIndex) or not 1 <= index(weight) <= MOST_WEIGHT:
        raise InvalidSetting(f"weight must be a whole number from 1 to {MOST_WEIGHT}, not {shown(weight)}")
    return index(weight)
