"""Finds out which executions nobody works on any more."""

from __future__ import annotations

import time
from collections.abc import Collection

from kvps.machine import process
from kvps_workers.queue.queue import QueueRow

_SILENT_S = 10.0  # a host that gives no sign of life for so long is lost


class LivenessTracker:
    """Which executions stay as they were while this process looks at them.

    It goes by its own clock alone: other machines' clocks differ. If it has not looked for long, the server or this
    process may have been stopped, and nobody is judged by that time.
    """

    def __init__(self) -> None:
        self._since: dict[tuple[str, str], tuple[str, float]] = {}
        self._looked = 0.0

    def lost(self, others: Collection[QueueRow], now: float | None = None) -> list[QueueRow]:
        """Which of these executions nobody works on any more. `now` is in seconds."""
        now = time.monotonic() if now is None else now
        if now - self._looked > _SILENT_S / 2:
            self._since.clear()
        self._looked, before = now, self._since
        self._since = {}
        for other in others:
            beat, since = before.get(other.held, (other.beat, now))
            self._since[other.held] = (other.beat, since if beat == other.beat else now)
        return [o for o in others if process.is_dead(o.process) or now - self._since[o.held][1] > _SILENT_S]
