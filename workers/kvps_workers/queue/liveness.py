"""Finds out which executions nobody works on any more."""

from __future__ import annotations

import time
from collections.abc import Collection

from kvps.machine import process
from kvps_workers.training import Started

_SILENT_S = 10.0  # a host that says nothing for so long is lost


class LivenessTracker:
    """What stays as it was while this process looks. By its own clock alone: others' differ; and if it has not looked
    for long, the server or this process may have been stopped, and nobody is judged by that time."""

    def __init__(self) -> None:
        self._since: dict[str, tuple[str, float]] = {}
        self._looked = 0.0
        self._first = ("", 0.0)

    def lost(self, others: Collection[Started], now: float | None = None) -> list[Started]:
        """Which of these executions nobody works on any more. `now` is in seconds."""
        now = time.monotonic() if now is None else now
        if now - self._looked > _SILENT_S / 2:
            self._since.clear()
        self._looked, before = now, self._since
        self._since = {}
        for other in others:
            key = f"{other.id}:{other.name}"
            beat, since = before.get(key, (other.beat, now))
            self._since[key] = (other.beat, since if beat == other.beat else now)
        return [o for o in others if self._dead(o) or now - self._since[f"{o.id}:{o.name}"][1] > _SILENT_S]

    def _dead(self, other: Started) -> bool:
        return process.is_dead(other.identity) if other.identity else False

    def stands(self, first: str, for_s: float) -> bool:
        """Whether the same task has been at the front for so long."""
        if first != self._first[0]:
            self._first = (first, time.monotonic())
        return first != "" and time.monotonic() - self._first[1] > for_s
