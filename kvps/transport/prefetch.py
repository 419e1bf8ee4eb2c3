"""Fetches a worker's next weights while it computes on the present ones, if the bound lets it begin a round early.

In SSP and ASP the weights of round r + 1 may be fetched before round r is pushed. The price is that they are older by
the time of one round. The bound still holds: it held when they were fetched, and a pull awaits its turn again before it
uses them, because a worker that joins meanwhile is behind all others. In BSP there is nothing to fetch ahead: no next
version exists before all workers' rounds are done.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress

from kvps.arrays.formats import format_of
from kvps.arrays.layout import Array
from kvps.arrays.weight_view import has_view
from kvps.errors import KvpsError
from kvps.protocol.job_state import RoundState
from kvps.transport.access import JobAccess
from kvps.transport.version_reader import VersionReader
from kvps.transport.weight_reader import PullRequest, WeightReader, Weights


class Prefetch:
    """The wrapper of a session's reader that reads ahead, on a thread of its own. The read is a future, which the next
    pull cancels if its round state has not come.

    There are two arrays: the session uses one while the next version is read into the other.
    """

    receives = False

    def __init__(
        self, access: JobAccess, versions: VersionReader, reader: WeightReader, memory: Callable[[], Array]
    ) -> None:
        """`memory` makes an array, (size,) float32. `reader` is one that `receives`."""
        self._access = access
        self._versions = versions
        self._reader = reader
        self._spare, self._used = memory(), memory()
        self._coming: Future[Weights] | None = None
        self._reads_parts = not has_view(format_of(access.config.weight_format))

    def read(self, request: PullRequest) -> Weights:
        """Return the weights that were or are being read ahead, or read them now. Then begin to read the next ones.

        A part of the model is read now: what was read ahead is older, and all of the model is more to read.
        """
        part_only = bool(request.part) and self._reads_parts
        weights = self._fetched()
        if weights is None or part_only:
            weights = self._reader.read(request._replace(into=self._spare))
        self._spare, self._used = self._used, self._spare
        if not part_only:
            self._begin(request.rounds_done + 1, weights.version)
        return weights

    def close(self) -> None:
        """Cancel the read that waits for its round state."""
        if self._coming:
            self._coming.cancel()
        self._reader.close()

    def _fetched(self) -> Weights | None:
        """Return the weights that were or are being read ahead; None if no read has begun, or it has failed."""
        coming = self._coming
        weights: Weights | None = None
        if coming and not coming.cancel():
            with suppress(KvpsError):  # the worker's own next call raises it too
                weights = coming.result()
        self._coming = None  # not before: a read that still runs writes to the spare array
        return weights

    def _begin(self, rounds_done: int, newer_than: int) -> None:
        """Begin to read a version after `newer_than` that admits a worker that has done `rounds_done` rounds."""
        self._coming = Future()
        arguments = (self._coming, rounds_done, newer_than)
        threading.Thread(target=self._run, args=arguments, name="kvps-prefetch", daemon=True).start()

    def _run(self, coming: Future[Weights], rounds_done: int, newer_than: int) -> None:
        try:
            state = self._await_round(coming, rounds_done, newer_than)
            if state and coming.set_running_or_notify_cancel():
                request = PullRequest(state, rounds_done, self._versions.round_state, self._spare)
                coming.set_result(self._reader.read(request))
        except BaseException as error:
            if coming.running() or coming.set_running_or_notify_cancel():
                coming.set_exception(error)

    def _await_round(self, coming: Future[Weights], rounds_done: int, newer_than: int) -> RoundState | None:
        """Wait for the first round state with a newer version that admits the round; None if the read was
        cancelled."""
        config, keys = self._access.config, self._access.keys
        while not coming.cancelled():
            state = self._versions.round_state()
            if state.version > newer_than and state.admits(rounds_done, config):
                return state
            self._access.client.wait({keys.turns: state.last_entry})
        return None
