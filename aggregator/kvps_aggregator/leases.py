"""The thread that renews the leases of all jobs and evicts silent workers, even while a round takes long.

A lease only says which aggregator works on a shard (liveness). An aggregator that loses one without noticing does no
harm, because every commit and every deletion is checked against the shard's term (safety).
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from kvps.connection.client import Client
from kvps.connection.stand_in import Duty
from kvps.errors import JobNotFound, KvpsError, TooManyClients
from kvps.job import Job
from kvps.machine import process
from kvps.protocol.answers import Evicted, ServerRestarted
from kvps.protocol.lua_scripts import Request, send_together
from kvps.protocol.recovery import begin_history, file_is_whole
from kvps.protocol.scripts import SCRIPTS

log = logging.getLogger("kvps.lease")

_CHECKS_PER_TIMEOUT = 5
_CLOCK_STEP_MS = 1000  # smaller corrections of a clock are not logged
_EARLY = 0.2  # of an interval: leases due that soon go into the request that is due now


class Upkeep(NamedTuple):
    """A request that keeps a lease or looks for silent workers. `act` is called with its result."""

    request: Request[Any]
    act: Callable[[Any], None]


class LeaseKeeper:
    """The keeper of the leases of any number of jobs of one server. Its thread runs while there are leases."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._due: dict[Leases, float] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def add(self, leases: Leases) -> None:
        """Begin to renew these leases."""
        with self._changed:
            self._due[leases] = time.monotonic() + leases.interval_s
            if not self._thread:
                self._thread = threading.Thread(target=self._run, name="kvps-leases", daemon=True)
                self._thread.start()
            self._changed.notify()

    def remove(self, leases: Leases) -> None:
        """Stop renewing these leases, and wait for the end of a renewal that is under way."""
        with self._changed:
            self._due.pop(leases, None)
            self._changed.notify()
        with leases.renewing:
            leases.fall_silent()

    def _run(self) -> None:
        try:
            self._renew()
        except BaseException:
            for leases in list(self._due):
                leases.fall_silent()
            raise

    def _renew(self) -> None:
        while due := self._await_due():
            try:
                self._keep(due)
            except TooManyClients as error:  # a job's own loop may have its connections already, and never meet this
                log.warning("leases cannot be renewed: %s", error)
            except KvpsError:
                pass  # the jobs' own loops meet the same error and report it
            finally:
                for leases in due:
                    leases.renewing.release()

    def _await_due(self) -> list[Leases]:
        """Wait for leases that are due, and return them with their `renewing` held; [] if no leases are left."""
        with self._changed:
            while self._due:
                now = time.monotonic()
                if (first := min(self._due.values())) > now:
                    self._changed.wait(first - now)
                    continue
                due = [leases for leases, time_ in self._due.items() if time_ <= now + _EARLY * leases.interval_s]
                self._due |= {leases: now + leases.interval_s for leases in due}
                # If `renewing` is taken, that job is giving up a shard: its other leases are renewed next time.
                if held := [leases for leases in due if leases.renewing.acquire(blocking=False)]:
                    return held
            self._thread = None
            return []

    def _keep(self, due: list[Leases]) -> None:
        run_id = "" if self._client.is_cluster else self._client.run_id()  # jobs of a cluster are on several servers
        for leases in due:
            with suppress(KvpsError):
                leases.watch(run_id)
        upkeep = [each for leases in due for each in leases.upkeep()]
        commands = [each.request.command for each in upkeep]
        replies = send_together(self._client.each, self._client.call, SCRIPTS, commands)
        for (request, act), reply in zip(upkeep, replies, strict=True):
            with suppress(KvpsError, ServerRestarted):  # the job's own loop meets the same error and reports it
                if isinstance(reply, Exception):
                    raise reply
                act(request.parse(reply))


class Leases:
    """The leases of one aggregator on one job, which `keeper` renews. `holder` is the aggregator's name in Redis.

    `renewing` is held during a renewal: a renewal after its shard was given up would take the shard back.
    """

    def __init__(self, job: Job, keeper: LeaseKeeper | None) -> None:
        config = job.config
        self.newest = 0  # the newest version that this process has seen
        self.holder = f"{process.mark(os.getpid())}:{secrets.token_hex(3)}"
        self.interval_s = min(config.lease_look_s, config.worker_timeout_ms / 1000 / _CHECKS_PER_TIMEOUT)
        self.renewing = threading.Lock()
        self._job = job
        self._run_id = job.state().run_id
        self._terms: dict[int, str] = {}
        self._duties: dict[int, Duty] = {}  # a step of the user's own may hold the interpreter's lock for long
        self._lock = threading.Lock()
        self._keeper = keeper or LeaseKeeper(job.access.client)
        self._keeper.add(self)

    def take(self, shard: int) -> tuple[str, str]:
        """Take a shard under a new term. Return (term, ""), or ("", holder) if another aggregator holds it."""
        term, other, future_ms = self._job.access.scripts.acquire(
            shard, self.holder, self._job.config.lease_ms, secrets.token_hex(4)
        )
        if future_ms:
            _warn_of_clock(self._job, f"the lease of shard {shard}", future_ms)
        if term:
            self._job.access.scripts.own(shard, term)
            with self._lock:
                self._forget(shard)
                self._terms[shard] = term
                self._duties[shard] = Duty(self._job.access.client, self.interval_s)
                self._duties[shard].done([self._renewal(shard, term).command])
            log.info("job %s: holds shard %d under term %s", self._job.name, shard, term)
        return term, other

    def watch(self, run_id: str = "") -> bool:
        """Begin a new history if the server was restarted, because it may have lost its last writes.

        Of all processes that call this, only the first changes anything. All shards are lost then, and must be taken
        and read again. `run_id` is the server's present run id; if it is "", the server is asked. Return False if the
        history cannot begin yet (see `file_is_whole`): call again.
        """
        job, run_id = self._job, run_id or self._job.access.server.run_id()
        if run_id == self._run_id:
            return True
        if not file_is_whole(job.access.server):
            return False
        begin_history(job.access.server, job.access.scripts, job.name, self.newest)
        with self._lock:
            if self._run_id != run_id:  # else the other thread was first, and may have taken shards since
                self._run_id = run_id
                for shard in list(self._terms):
                    self._forget(shard)
        return True

    def held(self) -> dict[int, str]:
        """Return shard -> term for the shards that this aggregator still holds, as far as it knows."""
        with self._lock:
            return dict(self._terms)

    def drop(self, shard: int) -> None:
        """Forget a shard that another aggregator turned out to hold."""
        with self._lock:
            self._forget(shard)

    def _forget(self, shard: int) -> str | None:
        """Hold a shard no more, and return its term. The caller has the lock."""
        if duty := self._duties.pop(shard, None):
            duty.end()
        return self._terms.pop(shard, None)

    def fall_silent(self) -> None:
        """Have the stand-in renew nothing more."""
        with self._lock:
            while self._duties:
                self._duties.popitem()[1].end()

    def release(self) -> None:
        """Give up all shards, so that a standby need not wait for their leases to expire."""
        self._keeper.remove(self)
        for shard in self.held():
            self.give_up(shard)

    def give_up(self, shard: int) -> None:
        """Give up a shard, so that a standby can take it at once."""
        with self.renewing:
            with self._lock:
                term = self._forget(shard)
            if term:
                with suppress(JobNotFound, ServerRestarted):  # then there is nothing to give up
                    self._job.access.scripts.renew(shard, self.holder, term, 0)

    def upkeep(self) -> list[Upkeep]:
        """Return the requests for the keeper to send: a renewal of each held shard, and one that evicts silent
        workers."""
        renewals = [
            Upkeep(self._renewal(shard, term), partial(self._renewed, shard, term))
            for shard, term in self.held().items()
        ]
        return [*renewals, Upkeep(self._job.access.scripts.eviction(aggregator=self.holder), self._evicted)]

    def _renewal(self, shard: int, term: str) -> Request[bool]:
        return self._job.access.scripts.renewal(shard, self.holder, term, self._job.config.lease_ms)

    def _renewed(self, shard: int, term: str, is_ours: bool) -> None:
        with self._lock:
            if self._terms.get(shard) != term:  # this aggregator gave the shard up or took it again meanwhile
                return
            if is_ours:
                if shard in self._duties:
                    self._duties[shard].done([self._renewal(shard, term).command])
                return
            self._forget(shard)
        log.warning("job %s: lost shard %d, another aggregator holds it", self._job.name, shard)

    def _evicted(self, evicted: Evicted) -> None:
        if evicted.future_ms > _CLOCK_STEP_MS:
            _warn_of_clock(self._job, "signs of life", evicted.future_ms)
        for worker in evicted.workers:
            silence_s = self._job.config.worker_timeout_ms / 1000
            log.warning("job %s: worker %s gave no sign of life for %g s: evicted", self._job.name, worker, silence_s)


def _warn_of_clock(job: Job, what: str, future_ms: int) -> None:
    log.warning(
        "job %s: the server's clock was set back: %s lay %.1f s in the future, and counts from now on",
        job.name,
        what,
        future_ms / 1000,
    )
