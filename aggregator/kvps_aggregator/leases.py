"""What must go on while a round takes long, on one thread for all jobs: renewing leases, looking for silent workers.

The lease only says who works (liveness). Whoever loses one without noticing can do no harm: every commit and
every deletion is checked against the shard's term (safety).
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from contextlib import suppress
from functools import partial

from kvps.connection.client import Client
from kvps.errors import JobNotFound, KvpsError, TooManyClients
from kvps.job import Job
from kvps.machine import process
from kvps.protocol.recovery import begin_history, file_is_whole
from kvps.protocol.scripts import Call, ServerRestarted
from kvps_aggregator.script_batch import Ask, in_one_request

log = logging.getLogger("kvps.lease")

_RENEWALS_PER_LEASE = 3
_LOOKS_PER_TIMEOUT = 5
_CLOCK_STEP_MS = 1000  # smaller corrections of a clock are not worth a line
_EARLY = 0.2  # of an interval: what is due so soon goes out with what is due now


class LeaseKeeper:
    """Renews the leases of any number of jobs of one server. Its thread runs while there are any."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._due: dict[Leases, float] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def add(self, leases: Leases) -> None:
        """Renew these from now on."""
        with self._changed:
            self._due[leases] = time.monotonic() + leases.interval_s
            if not self._thread:
                self._thread = threading.Thread(target=self._run, name="kvps-leases", daemon=True)
                self._thread.start()
            self._changed.notify()

    def remove(self, leases: Leases) -> None:
        """Renew these no more. Waits for the end of a renewal that is under way."""
        with self._changed:
            self._due.pop(leases, None)
            self._changed.notify()
        with leases.renewing:
            pass

    def _run(self) -> None:
        while due := self._await_due():
            try:
                self._keep(due)
            except TooManyClients as error:  # the jobs' own loops may have the connections that they need
                log.warning("leases cannot be renewed: %s", error)
            except KvpsError:
                pass  # those loops meet the same error, and can say it
            finally:
                for leases in due:
                    leases.renewing.release()

    def _await_due(self) -> list[Leases]:
        """Those that are due, each with its `renewing` held. None if there are no leases any more."""
        with self._changed:
            while self._due:
                now = time.monotonic()
                if (first := min(self._due.values())) > now:
                    self._changed.wait(first - now)
                    continue
                due = [leases for leases, at in self._due.items() if at <= now + _EARLY * leases.interval_s]
                self._due |= {leases: now + leases.interval_s for leases in due}
                # Of one that cannot be had a shard is being given up: the others of that job are renewed next time.
                if held := [leases for leases in due if leases.renewing.acquire(blocking=False)]:
                    return held
            self._thread = None
            return []

    def _keep(self, due: list[Leases]) -> None:
        run_id = self._client.run_id()
        for leases in due:
            with suppress(KvpsError):
                leases.watch(run_id)
        in_one_request(self._client, [ask for leases in due for ask in leases.asks()])


class Leases:
    """The leases of one aggregator on one job, which `keeper` renews. `holder` is what others see of it.

    `renewing` is held while a renewal is under way: one that came after its shard was given up would take it back.
    """

    def __init__(self, job: Job, keeper: LeaseKeeper | None = None) -> None:
        config = job.config
        self.newest = 0  # the newest version that this process has seen
        self.holder = f"{process.mark(os.getpid())}:{secrets.token_hex(3)}"
        self.interval_s = (
            min(config.lease_ms / _RENEWALS_PER_LEASE, config.worker_timeout_ms / _LOOKS_PER_TIMEOUT) / 1000
        )
        self.renewing = threading.Lock()
        self._job = job
        self._run_id = job.state().run_id
        self._terms: dict[int, str] = {}
        self._lock = threading.Lock()
        self._keeper = keeper or LeaseKeeper(job.client)
        self._keeper.add(self)

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

    def watch(self, run_id: str = "") -> bool:
        """Have a new history begun if the server was restarted, for it may have lost its last writes.

        Whoever is first does it for all. All shards are lost then, and have to be taken and read again. `life` is the
        server's present run id; without it the server is asked. Returns False if the history cannot begin yet, see
        `file_is_whole`: call it again.
        """
        job, run_id = self._job, run_id or self._job.client.run_id()
        if run_id == self._run_id:
            return True
        if not file_is_whole(job.client):
            return False
        begin_history(job.client, job.scripts, job.name, self.newest)
        with self._lock:
            if self._run_id != run_id:  # else the other thread was quicker, and may have taken shards since
                self._run_id = run_id
                self._terms.clear()
        return True

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
        self._keeper.remove(self)
        for shard in self.held():
            self.give_up(shard)

    def give_up(self, shard: int) -> None:
        """Let another have a shard at once."""
        with self.renewing:
            with self._lock:
                term = self._terms.pop(shard, None)
            if term:
                with suppress(JobNotFound, ServerRestarted):  # then there is nothing to give up
                    self._job.scripts.renew(shard, self.holder, term, 0)

    def asks(self) -> list[Ask]:
        """What the keeper has to ask for it now."""
        return [*(partial(self._renew, shard, term) for shard, term in self.held().items()), self._evict]

    def _renew(self, shard: int, term: str, call: Call) -> None:
        if self._job.scripts.through(call).renew(shard, self.holder, term, self._job.config.lease_ms):
            return
        with self._lock:
            if self._terms.get(shard) != term:  # taken again meanwhile
                return
            del self._terms[shard]
        log.warning("job %s: lost shard %d, another aggregator holds it", self._job.name, shard)

    def _evict(self, call: Call) -> None:
        evicted, future_ms = self._job.scripts.through(call).evict()
        if future_ms > _CLOCK_STEP_MS:
            _warn_of_clock(self._job, "signs of life", future_ms)
        for worker in evicted:
            log.warning("job %s: worker %s fell silent and was evicted", self._job.name, worker)


def _warn_of_clock(job: Job, what: str, future_ms: int) -> None:
    log.warning(
        "job %s: the server's clock was set back: %s lay %.1f s in the future, and counts from now on",
        *(job.name, what, future_ms / 1000),
    )
