"""Cases that take turns, and their medians, spreads and ratios. Pure, apart from the calls."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

Case = Callable[[], Sequence[float]]
"""Runs one turn; returns the seconds of each of its repetitions."""
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Ratio:
    """One case's time over another's, turn by turn: the median, the least and the greatest ratio."""

    median: float
    least: float
    greatest: float

    @classmethod
    def of(cls, each: Sequence[float]) -> Ratio:
        """Return the Ratio that sums up the ratios of all turns."""
        return cls(statistics.median(each), min(each), max(each))

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
        """Return the `q`-quantile, q in [0, 1], interpolated linearly between two values."""
        ordered = sorted(self.seconds)
        position = q * (len(ordered) - 1)
        low = int(position)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (ordered[high] - ordered[low]) * (position - low)

    def over(self, other: Times) -> Ratio:
        """Return how much longer this case took than `other`, which took turns with it, by the medians of each turn."""
        pairs = zip(self.turns, other.turns, strict=True)
        return Ratio.of([statistics.median(mine) / statistics.median(its) for mine, its in pairs])

    def to_dict(self) -> dict[str, float | int]:
        """Return the JSON form, with times in milliseconds."""
        quantiles = {f"p{round(100 * q)}_ms": round(1000 * self.quantile(q), 4) for q in (0.1, 0.5, 0.9, 0.99)}
        return {"n": len(self.seconds), **quantiles}


def in_turns(cases: Mapping[Key, Case], turns: int, warm_up: bool = True) -> dict[Key, Times]:
    """Run every case `turns` times, one after another, so that all cases meet the same disturbances.

    With `warm_up` each case first runs one more turn, which is not counted.
    """
    seconds: dict[Key, list[tuple[float, ...]]] = {key: [] for key in cases}
    for turn in range(0 if warm_up else 1, turns + 1):
        for key, case in cases.items():
            took = tuple(case())
            if turn:
                seconds[key].append(took)
    return {key: Times(tuple(values)) for key, values in seconds.items()}
