"""Ends the work on a job whose server deletes keys for want of memory: sums, clocks and weights may be among them."""

from __future__ import annotations

import logging
from contextlib import suppress

from kvps.connection.server_info import check_fit, evicted_keys
from kvps.errors import NotPermitted, ServerUnfit
from kvps.job import Job

log = logging.getLogger("kvps.commit")


class KeysEvicted(ServerUnfit):
    """The server has evicted keys, of whichever job: who serves others on it ends too."""


class EvictionGuard:
    """Watches how many keys the servers of one job have evicted. No server that does so is accepted at first, but the
    setting may be changed later; and of a key that is missing, most scripts cannot tell whether it was ever there."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._warned = ""
        self._before = self._evicted()

    def check(self) -> None:
        """Raise KeysEvicted if a server has evicted keys since the last check, or since this was made. Warn once of one
        that would."""
        before, self._before = self._before, self._evicted()
        if self._before > before:
            raise KeysEvicted(f"job {self._job.name!r} cannot go on: {self._job.access.client.eviction()}")

    def _evicted(self) -> int:
        """Return how many keys the servers have evicted; 0 if this user may not ask."""
        with suppress(NotPermitted):
            infos = self._job.access.client.on_masters(lambda node: node.call("INFO"))
            for info in infos:
                try:
                    check_fit(f"the server of job {self._job.name!r}", info)
                except ServerUnfit as unfit:
                    self._warn(str(unfit))
            return sum(map(evicted_keys, infos))
        return 0

    def _warn(self, message: str) -> None:
        if message != self._warned:
            log.warning("%s", message)
            self._warned = message
