"""Ends the work on a job whose server deletes keys for want of memory: sums, clocks and weights may be among them."""

from __future__ import annotations

from kvps.errors import ServerUnfit
from kvps.job import Job


class KeysEvicted(ServerUnfit):
    """The server has evicted keys, of whichever job: who serves others on it ends too."""


class EvictionGuard:
    """Watches how many keys the servers of one job have evicted. No server that does so is accepted at first, but the
    setting may be changed later; and of a key that is missing, most scripts cannot tell whether it was ever there."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._before = job.access.client.evicted_keys()

    def check(self) -> None:
        """Raise KeysEvicted if a server has evicted keys since the last check, or since this was made."""
        before, self._before = self._before, self._job.access.client.evicted_keys()
        if self._before > before:
            raise KeysEvicted(f"job {self._job.name!r} cannot go on: {self._job.access.client.eviction()}")
