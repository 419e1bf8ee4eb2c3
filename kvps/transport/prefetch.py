"""Fetches a worker's next weights while it computes on the present ones, where the bound lets it begin ahead of time.

In SSP and ASP the weights of round r + 1 may be taken before round r is pushed. They are then older by the time that a
round takes, which is the price. The bound is kept all the same: it held when they were taken, and a pull awaits its
turn again before it uses them, for a worker that joins meanwhile is behind all others. In BSP there is nothing to fetch
ahead: nobody's next weights are there before everybody's round is done.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import NamedTuple

from kvps.arrays.formats import format_of
from kvps.arrays.layout import Array
from kvps.errors import KvpsError
from kvps.protocol.job_state import Turn
from kvps.transport.access import JobAccess
from kvps.transport.version_reader import VersionReader


class FetchedWeights(NamedTuple):
    """A version that came ahead of time; `flat` is (size,) float32 and the taker's."""

    version: int
    flat: Array


class Prefetch:
    """Of one session, whose thread alone calls it. A fetch is a future on a thread of its own: who takes it before its
    turn has come cancels it."""

    def __init__(self, access: JobAccess, reader: VersionReader, spare: Array) -> None:
        """`spare`, (size,) float32, is where the first version goes."""
        self._access = access
        self._reader = reader
        self._format = format_of(access.config.weight_format)
        self._spare = spare
        self._coming: Future[int] | None = None

    def begin(self, rounds_done: int, newer_than: int) -> None:
        """Have a version fetched on which a worker may compute that has done `rounds_done` rounds."""
        self._coming = Future()
        arguments = (self._coming, rounds_done, newer_than)
        threading.Thread(target=self._run, args=arguments, name="kvps-prefetch", daemon=True).start()

    def take(self, present: Array) -> FetchedWeights | None:
        """What came, or is coming; None if nothing had begun to. Else `present` is the caller's no more."""
        coming = self._coming
        if not coming or coming.cancel():
            self._coming = None
            return None
        try:
            fetched = FetchedWeights(coming.result(), self._spare)
        except KvpsError:  # the worker's own next call will say it
            self._coming = None
            return None
        self._coming = None  # not before: what is still being fetched goes into the spare
        self._spare = present
        return fetched

    def close(self) -> None:
        """Forget what is coming."""
        if self._coming:
            self._coming.cancel()

    def _run(self, coming: Future[int], rounds_done: int, newer_than: int) -> None:
        try:
            turn = self._await_turn(coming, rounds_done, newer_than)
            if turn and coming.set_running_or_notify_cancel():
                coming.set_result(self._reader.weights(turn, self._spare, self._format))
        except BaseException as error:
            if coming.running() or coming.set_running_or_notify_cancel():
                coming.set_exception(error)

    def _await_turn(self, coming: Future[int], rounds_done: int, newer_than: int) -> Turn | None:
        """The first turn with a newer version that admits the round; None if nobody waits for it any more."""
        config, keys = self._access.config, self._access.keys
        while not coming.cancelled():
            turn = self._reader.turn()
            if turn.version > newer_than and turn.admits(rounds_done, config.staleness, config.workers):
                return turn
            self._access.client.wait({keys.turns: turn.last_entry})
        return None
