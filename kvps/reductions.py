"""How the contributions of a version become one gradient, as a setting of a job.

This module has only what a user chooses; `kvps_aggregator.step.reduce` computes.
"""

from __future__ import annotations

import re
from operator import index
from typing import NamedTuple, SupportsIndex

from kvps.errors import InvalidSetting

PLAIN = ("mean", "sum", "weighted", "median")
MOST_WEIGHT = 2**31
"""The greatest weight of a contribution."""
_PART = re.compile(r"0?\.[0-9]{1,6}")


class Reduction(NamedTuple):
    """A reduction: its kind, and for `trimmed` the part of the values that is left out at each end."""

    kind: str
    part: float = 0.0

    @property
    def is_ordered(self) -> bool:
        """Whether it needs all contributions at once, to sort their values."""
        return self.kind in ("median", "trimmed")


def parse(text: object) -> Reduction:
    """Return the reduction that a setting names: mean, sum, weighted, median or trimmed:PART. Raises InvalidSetting."""
    if isinstance(text, str):
        if text in PLAIN:
            return Reduction(text)
        kind, _, part = text.partition(":")
        if kind == "trimmed" and _PART.fullmatch(part) and 0 < float(part) < 0.5:
            return Reduction(kind, float(part))
    raise InvalidSetting(
        f"reduction must be one of {', '.join(PLAIN)}, or trimmed:PART with a PART above 0 and below 0.5, "
        f"not {text!r:.80}"
    )


def check_weight(weight: object, reduction: str) -> int:
    """Return a contribution's weight, 1 for None. Raises InvalidSetting unless a job of this reduction takes it."""
    if weight is None:
        return 1
    if reduction != "weighted":
        raise InvalidSetting(
            f"weight is for jobs with the reduction weighted, and this job's is {reduction}: leave it out, or create "
            f"the job with reduction='weighted'"
        )
    if isinstance(weight, bool) or not isinstance(weight, SupportsIndex) or not 1 <= index(weight) <= MOST_WEIGHT:
        raise InvalidSetting(f"weight must be a whole number from 1 to {MOST_WEIGHT}, not {weight!r:.80}")
    return index(weight)
