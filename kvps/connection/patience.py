"""How long a process waits for a Redis that does not answer, and what it says meanwhile."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable

from kvps.errors import InvalidSetting, shown

log = logging.getLogger("kvps.connection")

PATIENCE = "KVPS_PATIENCE"
"""The environment variable of the seconds that a process waits; `kvps_cli.server_options` has an option for it."""
PATIENCE_S = 60.0  # Sentinels see a dead master after 30 s unless that is set, and vote after that
_SAY_EVERY_S = 10.0
LAST_S = 2.0  # for what a process that a signal ends still asks of its server

_said: dict[str, float] = {}  # server -> when a line about it was logged: all threads share one
_saying = threading.Lock()
ending = threading.Event()
"""Set when all calls of this process are to give up soon, because a signal ends it."""


def patience_s() -> float:
    """Return for how many seconds the environment has this process wait; infinity for 0. Raises InvalidSetting."""
    text = os.environ.get(PATIENCE) or str(PATIENCE_S)
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1
    if not 0 <= seconds < math.inf:
        raise InvalidSetting(f"{PATIENCE} is a number of seconds, or 0 for no limit, and not {shown(text)}")
    return seconds or math.inf


class Retries:
    """The times at which to try again: soon at first, then less often, until there is no progress for `patience_s`.

    Every 10 s a line says for what the server `where` is waited for.
    """

    def __init__(self, patience_s: float, where: str = "") -> None:
        self.patience_s = patience_s
        self._where = where
        self._spoke = False
        self.progress()

    def progress(self) -> None:
        """Begin anew, because there was progress."""
        self._since, self._delay_s = time.monotonic(), 0.01
        self._deadline = self._since + self.patience_s

    def pause(self, why: Callable[[], str], answers: bool = False) -> bool:
        """Wait for a moment and return True; return False at once if that would be longer than patience lasts.

        `why` returns what the server does, as "no answer". A server that `answers`, but cannot serve yet, is waited for
        without limit.
        """
        now = time.monotonic()
        if answers:
            self._deadline = now + self._delay_s + self.patience_s
        deadline = min(self._deadline, self._since + LAST_S) if ending.is_set() else self._deadline
        if now + self._delay_s > deadline:
            return False
        if self._may_say(now):
            limit = "" if answers or math.isinf(self.patience_s) else f" (of {self.patience_s:g})"
            log.warning("waits for Redis at %s: %s for %.0f s%s", self._where, why(), now - self._since, limit)
        # A server that is away or full sends no event: this is the only wait without an event to wait for.
        time.sleep(self._delay_s)
        self._delay_s = min(self._delay_s * 2, 0.5)
        return True

    def over(self) -> None:
        """Say that the wait is over, if a line said that there was one."""
        if self._spoke:
            log.warning("Redis at %s answers again after %.0f s", self._where, time.monotonic() - self._since)

    @property
    def lasted(self) -> str:
        """How long was waited, for a message."""
        waited_s = time.monotonic() - self._since
        return f"{waited_s:.0f} s" if math.isinf(self.patience_s) else f"{self.patience_s:g} s"

    def _may_say(self, now: float) -> bool:
        """Return whether a line is due, and this thread is the one to say it."""
        if now - self._since < _SAY_EVERY_S:
            return False
        with _saying:
            if now - _said.get(self._where, -math.inf) < _SAY_EVERY_S:
                return False
            _said[self._where] = now
        self._spoke = True
        return True
