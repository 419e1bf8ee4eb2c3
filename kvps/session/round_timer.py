"""When a worker's round is over, in a job whose rounds end by the clock: each worker takes as many steps as it has time
for."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from statistics import median

from kvps.config import JobConfig

_STEPS = 9  # the median of so many is what a step takes: one that an evaluation or a compiler held up does not count


class RoundTimer:
    """The clock of one worker's rounds. A round takes the job's `round_ms`. In BSP, where workers are in step, it is
    counted from the commit of the version that it begins with; else from the pull, because a worker pulls a version
    that may be older than a round. It has at least one step. A step is not begun if its middle would probably be after
    the end of the round."""

    def __init__(self, config: JobConfig) -> None:
        self._round_s = config.round_ms / 1000
        self._in_step = config.staleness == 0
        self._ends_at = self._stepped_at = 0.0
        self._steps: deque[float] = deque(maxlen=_STEPS)

    def begin(self, age_s: Callable[[], float]) -> None:
        """Begin a round now. `age_s` returns how long ago its version was committed: a worker that joins late in BSP
        ends with the others."""
        self._stepped_at = time.monotonic()
        self._ends_at = self._stepped_at + self._round_s - (age_s() if self._in_step else 0.0)

    @property
    def step_s(self) -> float:
        """How long the present step has taken so far."""
        return time.monotonic() - self._stepped_at

    def over(self) -> bool:
        """Note the end of a step. Return whether the round ends with it."""
        self._steps.append(self.step_s)
        self._stepped_at += self._steps[-1]
        return self._stepped_at + median(self._steps) / 2 > self._ends_at
