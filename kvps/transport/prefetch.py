"""Fetches a worker's next weights while it computes on the present ones, if the bound lets it begin a round early.

In SSP and ASP the weights of round r + 1 may be fetched before round r is pushed. The price is that they are older by
the time of one round. The bound still holds: it held when they were fetched, and a pull awaits its round again before
it uses them, because a worker that joins meanwhile is behind all others. In BSP there is nothing to fetch ahead: no
next version exists before all workers' rounds are done.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import NamedTuple

from kvps.arrays.layout import Array
from kvps.errors import KvpsError
from kvps.protocol.job_state import RoundState
from kvps.transport.access import JobAccess
from kvps.transport.version_reader import Arrived, VersionReader

Pull = Callable[[RoundState, Array, Arrived | None], int]
"""A function that reads the weights of a round state, or newer ones, into an array, and returns their version."""


class FetchedWeights(NamedTuple):
    """A version that was fetched ahead; `flat` is (size,) float32 and belongs to the caller of `take`."""

    version: int
    flat: Array


class Prefetch:
    """The prefetch of one session, whose thread alone calls it. A fetch is a future on a thread of its own; `take`
    cancels a fetch whose version has not come."""

    def __init__(self, access: JobAccess, reader: VersionReader, spare: Array, pull: Pull) -> None:
        """`spare`, (size,) float32, receives the first version that `pull` reads."""
        self._access = access
        self._reader = reader
        self._pull = pull
        self._spare = spare
        self._coming: Future[int] | None = None

    def begin(self, rounds_done: int, newer_than: int) -> None:
        """Begin to fetch a version after `newer_than` that admits a worker that has done `rounds_done` rounds."""
        self._coming = Future()
        arguments = (self._coming, rounds_done, newer_than)
        threading.Thread(target=self._run, args=arguments, name="kvps-prefetch", daemon=True).start()

    def take(self, present: Array) -> FetchedWeights | None:
        """Return the weights that were or are being read, in exchange for `present`; None if no read has begun."""
        coming = self._coming
        if not coming or coming.cancel():
            self._coming = None
            return None
        try:
            fetched = FetchedWeights(coming.result(), self._spare)
        except KvpsError:  # the worker's own next call raises it too
            self._coming = None
            return None
        self._coming = None  # not before: a fetch that still runs writes to the spare
        self._spare = present
        return fetched

    def drop(self) -> None:
        """Cancel the fetch, or wait until it has ended, and forget what it has read: it is old once it is taken."""
        coming, self._coming = self._coming, None
        if coming and not coming.cancel():
            with suppress(KvpsError):  # the worker's own next call raises it too
                coming.result()

    def close(self) -> None:
        """Cancel the fetch."""
        if self._coming:
            self._coming.cancel()

    def _run(self, coming: Future[int], rounds_done: int, newer_than: int) -> None:
        try:
            state = self._await_round(coming, rounds_done, newer_than)
            if state and coming.set_running_or_notify_cancel():
                coming.set_result(self._pull(state, self._spare, None))
        except BaseException as error:
            if coming.running() or coming.set_running_or_notify_cancel():
                coming.set_exception(error)

    def _await_round(self, coming: Future[int], rounds_done: int, newer_than: int) -> RoundState | None:
        """Wait for the first round state with a newer version that admits the round; None if the fetch was
        cancelled."""
        config, keys = self._access.config, self._access.keys
        while not coming.cancelled():
            state = self._reader.round_state()
            if state.version > newer_than and state.admits(rounds_done, config):
                return state
            self._access.client.wait({keys.turns: state.last_entry})
        return None
