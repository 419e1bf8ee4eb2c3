"""Cases that take turns, and what is said of them: medians, spreads, ratios. Pure but for the calls."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Case = Callable[[], Sequence[float]]
"""Runs one turn; the seconds that each of its repetitions took."""


@dataclass(frozen=True)
class Times:
    """The seconds of all turns of one case."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def quantile(self, q: float) -> float:
        """The `q`-quantile, q in [0, 1], between two values in proportion."""
        ordered = sorted(self.seconds)
        low = min(int(q * (len(ordered) - 1)), len(ordered) - 2) if len(ordered) > 1 else 0
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (ordered[high] - ordered[low]) * (q * (len(ordered) - 1) - low)

    def to_dict(self) -> dict[str, float | int]:
        """What goes into the JSON; times in milliseconds."""
        quantiles = {f"p{round(100 * q)}_ms": round(1000 * self.quantile(q), 4) for q in (0.1, 0.5, 0.9, 0.99)}
        return {"n": len(self.seconds), **quantiles}


def in_turns(cases: Mapping[str, Case], turns: int) -> dict[str, Times]:
    """Run every case `turns` times, one after the other, so that all meet the same weather. The first turn warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(turns + 1):
        for name, case in cases.items():
            took = case()
            if turn:
                seconds[name] += took
    return {name: Times(tuple(values)) for name, values in seconds.items()}
