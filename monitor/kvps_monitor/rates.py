"""How much there was in a second, lately."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

WINDOW_S = 10.0
"""A rate is that of so many seconds, or of the time of `_GAPS` rounds or versions where they take longer."""
_GAPS = 3
_GAPS_SEEN = 8  # the last ones, of which the middle one counts


class Lately(NamedTuple):
    """What has ended in the last ten seconds, or in the time of three where one takes longer; and the seconds in which
    it was made. Nothing has a rate of 0, however much there was before."""

    entries: Sequence[Any]
    seconds: float

    @classmethod
    def of(cls, kept: Sequence[Any], now_us: int) -> Lately:
        """`kept` are iterations or versions with times, oldest first."""
        gaps = sorted(later.ended_us - each.ended_us for each, later in pairwise(kept[-_GAPS_SEEN - 1 :]))
        window_us = max(1e6 * WINDOW_S, _GAPS * gaps[len(gaps) // 2] if gaps else 0.0)
        entries = [each for each in kept if now_us - each.ended_us < window_us]
        if not entries:
            return cls([], math.inf)
        before = len(kept) - len(entries)
        began = max(kept[before - 1].ended_us, now_us - window_us) if before else entries[0].at_us
        ended = entries[-1].ended_us
        if now_us - ended > 2 * (ended - began) / len(entries):  # the present one takes long: its time counts too
            ended = now_us
        return cls(entries, (ended - began) / 1e6 if ended > began else math.inf)

    def per_second(self, what: str = "") -> float:
        """Return how many there were in a second; or the sum of an attribute of theirs, in a second."""
        return (sum(getattr(each, what) for each in self.entries) if what else len(self.entries)) / self.seconds
