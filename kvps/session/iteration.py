"""Measures how long the parts of a worker's iterations take."""

from __future__ import annotations

import time


class IterationTimer:
    """A timer of waiting for the turn, fetching, computing and pushing. `trace` is the trace of the last whole
    iteration; it goes with the next call that writes anyway."""

    def __init__(self) -> None:
        self.trace: list[object] = []
        self._pull_ms: dict[str, float] = {}
        self._since = time.perf_counter()

    def pulled(self, began: float, turn_came: float) -> None:
        """Note that a pull ends now. It `began`, and its turn came, at these times of `time.perf_counter`."""
        self._since = time.perf_counter()
        self._pull_ms = {"wait": 1000 * (turn_came - began), "fetch": 1000 * (self._since - turn_came)}

    def pushed(self, began: float, round_: int, version: int, loss: float | None) -> None:
        """Note that a push ends now that `began` at this time."""
        spans = self._pull_ms | {
            "compute": 1000 * (began - self._since),
            "push": 1000 * (time.perf_counter() - began),
        }
        self.trace = ["round", round_, "version", version]
        for name, milliseconds in spans.items():
            self.trace += [f"{name}_ms", f"{milliseconds:.3f}"]
        if loss is not None:
            self.trace += ["loss", f"{loss:.6g}"]
