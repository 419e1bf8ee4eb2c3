"""What must go on while a round takes long, on a thread of its own: renewing leases, and looking for silent workers.

The lease only says who works (liveness). Whoever loses one without noticing can do no harm: every commit and
every deletion is checked against the shard's term (safety).
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
from contextlib import suppress

from kvps import process
from kvps.errors import KvpsError, ServerError
from kvps.job import Job

log = logging.getLogger("kvps.lease")

_RENEWALS_PER_LEASE = 3
_LOOKS_PER_TIMEOUT = 5
_CLOCK_STEP_MS = 1000  # smaller corrections of a clock are not worth a line


class Leases:
    """The leases of one aggregator process on one job. `holder` is what others see of it."""

    def __init__(self, job: Job) -> None:
        self.newest = 0  # the newest version that this process has seen
        self.holder = f"{process.mark(os.getpid())}:{secrets.token_hex(3)}"
        self._job = job
        self._life = job.state().server
        self._terms: dict[int, str] = {}
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._keep, name=f"kvps-lease-{job.name}", daemon=True)
        self._thread.start()

    def take(self, shard: int) -> tuple[str, str]:
        """Take a shard under a new term: (term, ""), or ("", the other holder)."""
        term, other, future_ms = self._job.scripts.acquire(
            shard, self.holder, self._job.config.lease_ms, secrets.token_hex(4)
        )
        if future_ms:
            _warn_of_clock(self._job, f"the lease of shard {shard}", future_ms)
        if term:
            self._job.scripts.own(shard, term)
            with self._lock:
                self._terms[shard] = term
            log.info("job %s: holds shard %d under term %s", self._job.name, shard, term)
        return term, other

    def watch(self) -> None:
        """Have a new history begun if the server has begun a new life, for it may have lost its last writes.

        Whoever is first does it for all. All shards are lost then, and have to be taken and read again.
        """
        life = self._job.client.run_id()
        if life == self._life:
            return
        version, history = self._job.scripts.recover(life, secrets.token_hex(4), self.newest)
        log.warning("job %s: its server began a new life: history %s from version %d", self._job.name, history, version)
        with self._lock:
            if self._life == life:  # the other thread was quicker, and may have taken shards since
                return
            self._life = life
            self._terms.clear()
        self._rewrite()

    def _rewrite(self) -> None:
        """Have the server write its append-only file anew, if it keeps one.

        Of a file that ended in the middle of a transaction Redis drops the last command alone: what stands before it in
        that transaction stays there, and is run together with the next one at the start after this.
        """
        if self._job.client.call("INFO", "persistence")["aof_enabled"]:
            with suppress(ServerError):  # it is at it already, or does not let this user
                self._job.client.call("BGREWRITEAOF")

    def held(self) -> dict[int, str]:
        """Shard -> term of what is still this aggregator's, as far as it knows."""
        with self._lock:
            return dict(self._terms)

    def drop(self, shard: int) -> None:
        """Forget a shard that turned out to be another's."""
        with self._lock:
            self._terms.pop(shard, None)

    def release(self) -> None:
        """Give all shards up, so that a standby need not wait for their leases to expire."""
        self._stopped.set()
        self._thread.join()
        for shard in self.held():
            self.give_up(shard)

    def give_up(self, shard: int) -> None:
        """Let another have a shard at once."""
        with self._lock:  # a renewal in between would keep it from the other
            if term := self._terms.pop(shard, None):
                self._job.scripts.renew(shard, self.holder, term, 0)

    def _keep(self) -> None:
        config = self._job.config
        interval_ms = min(config.lease_ms / _RENEWALS_PER_LEASE, config.worker_timeout_ms / _LOOKS_PER_TIMEOUT)
        while not self._stopped.wait(interval_ms / 1000):
            try:
                self.watch()
                self._renew()
                evicted, future_ms = self._job.scripts.evict()
                if future_ms > _CLOCK_STEP_MS:
                    _warn_of_clock(self._job, "signs of life", future_ms)
                for worker in evicted:
                    log.warning("job %s: worker %s fell silent and was evicted", self._job.name, worker)
            except KvpsError:
                continue  # the loop meets the same error, and it can say it

    def _renew(self) -> None:
        for shard in self.held():
            with self._lock:
                term = self._terms.get(shard)
                if not term or self._job.scripts.renew(shard, self.holder, term, self._job.config.lease_ms):
                    continue
                del self._terms[shard]
            log.warning("job %s: lost shard %d, another aggregator holds it", self._job.name, shard)


def _warn_of_clock(job: Job, what: str, future_ms: int) -> None:
    log.warning(
        "job %s: the server's clock was set back: %s lay %.1f s in the future, and counts from now on",
        *(job.name, what, future_ms / 1000),
    )
