"""Cases that take turns, and what is said of them: medians, spreads, ratios. Pure but for the calls."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvps.errors import KvpsError

Case = Callable[[], Sequence[float]]
"""Runs one turn; the seconds that each of its repetitions took."""


class CaseFailed(KvpsError):
    """A case that cannot go on, which the others may do without."""


@dataclass(frozen=True)
class Ratio:
    """One case's time over another's, turn by turn: the median of those, the least and the greatest."""

    median: float
    least: float
    greatest: float

    @classmethod
    def of(cls, each: Sequence[float]) -> Ratio:
        """From the ratio of every turn."""
        return cls(statistics.median(each), min(each), max(each))

    @property
    def inverse(self) -> Ratio:
        return Ratio(1 / self.median, 1 / self.greatest, 1 / self.least)

    def to_dict(self) -> dict[str, float]:
        return {"ratio": self.median, "least": self.least, "greatest": self.greatest}


@dataclass(frozen=True)
class Times:
    """The seconds of one case, turn by turn."""

    turns: tuple[tuple[float, ...], ...]

    @property
    def seconds(self) -> list[float]:
        return [second for turn in self.turns for second in turn]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def quantile(self, q: float) -> float:
        """The `q`-quantile, q in [0, 1], between two values in proportion."""
        ordered = sorted(self.seconds)
        at = q * (len(ordered) - 1)
        low = int(at)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (ordered[high] - ordered[low]) * (at - low)

    def over(self, other: Times, q: float = 0.5) -> Ratio:
        """How much longer this case took than another that took its turns with it, by their `q`-quantiles."""
        pairs = zip(self.turns, other.turns, strict=True)
        each = [Times((mine,)).quantile(q) / Times((its,)).quantile(q) for mine, its in pairs]
        return Ratio.of(each)

    def to_dict(self) -> dict[str, float | int]:
        """What goes into the JSON; times in milliseconds."""
        quantiles = {f"p{round(100 * q)}_ms": round(1000 * self.quantile(q), 4) for q in (0.1, 0.5, 0.9, 0.99)}
        return {"n": len(self.seconds), **quantiles}


def in_turns(cases: Mapping[str, Case], turns: int, warm_up: bool = True) -> dict[str, Times]:
    """Run every case `turns` times, one after the other, so that all meet the same weather.

    With `warm_up` each runs once more before, which is not counted. A case that raises CaseFailed has no more turns,
    and is not in what is returned.
    """
    seconds: dict[str, list[tuple[float, ...]]] = {name: [] for name in cases}
    for turn in range(0 if warm_up else 1, turns + 1):
        for name, case in cases.items():
            if name not in seconds:
                continue
            try:
                took = tuple(case())
            except CaseFailed:
                del seconds[name]
                continue
            if turn:
                seconds[name].append(took)
    return {name: Times(tuple(values)) for name, values in seconds.items()}
