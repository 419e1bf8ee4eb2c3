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
from kvps.config import JobConfig
from kvps.connection.client import Client
from kvps.errors import KvpsError
from kvps.protocol.keys import JobKeys
from kvps.transport.version_reader import Reader


class FetchedWeights(NamedTuple):
    """A version that came ahead of time; `flat` is (size,) float32 and the taker's."""

    version: int
    flat: Array


class _Order:
    """One version to be fetched. Only who claims it goes on: the fetcher to fetch it, or the worker to forget it."""

    def __init__(self, rounds_done: int, newer_than: int) -> None:
        self.rounds_done = rounds_done
        self.newer_than = newer_than
        self._lock = threading.Lock()

    @property
    def claimed(self) -> bool:
        return self._lock.locked()

    def claim(self) -> bool:
        """Whether the caller is the first."""
        return self._lock.acquire(blocking=False)


class Prefetch:
    """Of one session, whose thread alone calls it. Threads: one that fetches, and one that may still wait in vain."""

    def __init__(self, client: Client, keys: JobKeys, config: JobConfig, reader: Reader, spare: Array) -> None:
        """`spare`, (size,) float32, is where the first version goes."""
        self._client = client
        self._keys = keys
        self._config = config
        self._reader = reader
        self._wire = format_of(config.weight_format)
        self._spare = spare
        self._order: _Order | None = None
        self._coming: Future[int | None] | None = None

    def begin(self, rounds_done: int, newer_than: int) -> None:
        """Have a version fetched on which a worker may compute that has done `rounds_done` rounds."""
        self._order = _Order(rounds_done, newer_than)
        self._coming = Future()
        threading.Thread(target=self._run, args=(self._order, self._coming), name="kvps-prefetch", daemon=True).start()

    def _run(self, order: _Order, coming: Future[int | None]) -> None:
        try:
            coming.set_result(self._fetch(order))
        except BaseException as error:
            coming.set_exception(error)

    def take(self, present: Array) -> FetchedWeights | None:
        """What came, or is coming; None if nothing had begun to. Else `present` is the caller's no more."""
        order, coming = self._order, self._coming
        if not order or not coming or order.claim():
            self._order = self._coming = None
            return None
        try:
            version = coming.result()
        except KvpsError:  # the worker's own next call will say it
            version = None
        self._order = self._coming = None  # not before: what is still being fetched is into the spare
        if version is None:
            return None
        fetched, self._spare = FetchedWeights(version, self._spare), present
        return fetched

    def close(self) -> None:
        """Forget what is coming."""
        if self._order:
            self._order.claim()

    def _fetch(self, order: _Order) -> int | None:
        config = self._config
        while True:
            turn = self._reader.turn()
            if turn.version > order.newer_than and turn.admits(order.rounds_done, config.staleness, config.workers):
                return self._reader.weights(turn, self._spare, self._wire) if order.claim() else None
            self._client.wait({self._keys.turns: turn.last_entry})
            if order.claimed:
                return None
