"""Finds the executions whose hosts are lost."""

from __future__ import annotations

import time
from collections.abc import Collection

from kvps.machine import process
from kvps_workers.queue.queue import QueueRow

_SILENT_S = 10.0  # a host that gives no sign of life for so long is lost


class LivenessTracker:
    """The record of how long each execution has shown no new sign of life while this process was looking.

    It goes by this process's clock alone, because other machines' clocks differ. If this process has not looked for
    long, it or the server may have been stopped, and no host is judged by that time.
    """

    def __init__(self) -> None:
        self._since: dict[tuple[str, str], tuple[str, float]] = {}
        self._looked = 0.0

    def lost(self, others: Collection[QueueRow], now: float | None = None) -> list[QueueRow]:
        """Return those of these executions whose hosts are lost. `now` is in seconds."""
        now = time.monotonic() if now is None else now
        if now - self._looked > _SILENT_S / 2:
            self._since.clear()
        self._looked, before = now, self._since
        self._since = {}
        for other in others:
            beat, since = before.get(other.held, (other.beat, now))
            self._since[other.held] = (other.beat, since if beat == other.beat else now)
        return [o for o in others if process.is_dead(o.process) or now - self._since[o.held][1] > _SILENT_S]
