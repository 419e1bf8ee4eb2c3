"""The server's clock as a process knows it, so that times of several hosts are on one axis.

The offset is estimated as NTP does (RFC 5905, section 10): a request asks the server for its time, which is taken for
the middle between its sending and its answer. Of the last samples the one with the least delay counts: it is wrong by
half its delay at the most.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

_SAMPLES = 8


class _Sample(NamedTuple):
    delay_s: float
    offset_s: float


class ServerClock:
    """The clock of one server. `ask` returns its time in seconds since 1970. One thread samples it, any may read it."""

    def __init__(self, ask: Callable[[], float]) -> None:
        self._ask = ask
        self._samples: deque[_Sample] = deque(maxlen=_SAMPLES)
        self._best: _Sample | None = None

    def sample(self) -> None:
        """Ask the server once. Raises what `ask` raises."""
        began = time.perf_counter()
        server = self._ask()
        ended = time.perf_counter()
        self._samples.append(_Sample(ended - began, server - (began + ended) / 2))
        self._best = min(self._samples)

    def micros(self, moment: float) -> int | None:
        """Return the server's time, in microseconds since 1970, at a `moment` of this process's `time.perf_counter`;
        None before the first sample."""
        best = self._best
        return round(1e6 * (moment + best.offset_s)) if best else None

    @property
    def error_s(self) -> float:
        """The most by which `micros` can be wrong, in seconds; infinite before the first sample."""
        return self._best.delay_s / 2 if self._best else float("inf")
