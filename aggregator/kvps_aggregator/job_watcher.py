"""Serves every job of a server: a job with work to do by an `Aggregator` of its own, all idle jobs by one thread.

A join is an entry in the job's commit log. So one blocking read over the logs of all idle jobs notices every join, and
an idle job costs no thread, no connection and no lease of its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from functools import partial
from typing import NamedTuple

from kvps.errors import JobNotFound, KvpsError, NoServer, ServerError, ServerLost
from kvps.job import Job, readable
from kvps.protocol.keys import JOBS, JobKeys
from kvps.protocol.recovery import LOOK_S, begin_history, file_is_whole
from kvps.store import Store
from kvps.transport.base import Transport
from kvps_aggregator.aggregator import Aggregator
from kvps_aggregator.eviction_guard import KeysEvicted
from kvps_aggregator.held_shards import AggregatorOptions
from kvps_aggregator.leases import LeaseKeeper

_LIST_MS = 500  # between two reads of the list of jobs
_LINGER_S = 5.0  # a job is served this long after its last worker has gone: one that returns soon finds it in memory
_AGAIN_S = 1.0  # until a job that could not be read, or whose aggregator failed, is tried again; doubles with each try
_MOST_AGAIN_S = 30.0
_READ_AT_ONCE = 100  # jobs that are read before the watcher listens to the idle ones again


class _Watched(NamedTuple):
    """An idle job. `last_entry` is the newest of its log; `transport` is None if this process cannot tell that its
    arrays are lost."""

    id: str
    last_entry: str
    version: int
    transport: Transport | None


class _Aside(NamedTuple):
    """A job that is neither watched nor served before `until`, after `rest_s` seconds, and why."""

    until: float
    rest_s: float
    why: str


class JobWatcher:
    """The watcher that serves every job of a server, later ones too. `run` it on one thread; `stop` it from another.

    `warn` is called with what went wrong with a job, `announce` once with each job that is not finished. `last_turn` is
    the time (time.monotonic) at which the server last answered `run`, which asks about twice a second.
    """

    def __init__(
        self,
        store: Store,
        warn: Callable[[str], None],
        announce: Callable[[Job], None],
        options: AggregatorOptions | None = None,
        allow: Collection[str] = (),
    ) -> None:
        """Anybody who may create jobs may name code in them, so a job is served only if `allow` has all names of code
        that it needs. Raises InvalidSetting for nodes that are near without a cluster."""
        if options and options.near:
            options.near.check(store.client)
        self._allow = allow
        self._store = store
        self._warn = warn
        self._announce = announce
        self._stopped = threading.Event()
        self._aggregator = partial(Aggregator, stop=self._stopped, options=options, keeper=LeaseKeeper(store.client))
        self._run_id = ""
        self._watched: dict[str, _Watched] = {}
        self._unread: set[str] = set()  # names of watched jobs that must be read again
        self._aside: dict[str, _Aside] = {}  # kept until the job was read or served without a fault
        self._threads: dict[str, threading.Thread] = {}
        self._failed: dict[str, str] = {}  # names of jobs whose aggregator has failed, and why
        self._known: set[str] = set()  # ids
        self._lost: list[ServerError] = []
        self.last_turn = time.monotonic()

    def stop(self) -> None:
        """Make `run` give up all shards and return."""
        self._stopped.set()

    def run(self) -> None:
        """Serve until `stop`. Raises ServerLost, ServerError."""
        try:
            wait_ms = 1
            while not self._stopped.is_set():
                arrived, listed = self._listen(wait_ms)
                self.last_turn = time.monotonic()
                self._unread |= arrived
                waiting = self._to_be_read(listed)
                for name in waiting[:_READ_AT_ONCE]:
                    self._read(name)
                wait_ms = 1 if len(waiting) > _READ_AT_ONCE else _LIST_MS
        finally:
            self._stopped.set()
            for thread in self._threads.values():
                thread.join()
        if self._lost:
            raise self._lost[0]

    # -- all jobs ---------------------------------------------------------------------------------------------

    def _listen(self, wait_ms: int) -> tuple[set[str], set[str]]:
        """Wait up to `wait_ms` for news. Return the names of the idle jobs with new log entries, and of all jobs."""
        client, commands = self._store.client, [("SMEMBERS", JOBS), ("INFO", "server")]
        streams = {JobKeys(name).commits: job.last_entry for name, job in self._watched.items()}
        arrived: dict[str, str] = {}
        try:
            if streams:
                arrived, (listed, server), _ = client.wait_and_read(streams, commands, timeout_ms=wait_ms)
            else:
                self._stopped.wait(wait_ms / 1000)
                listed, server = client.together(commands)
        except ServerLost:
            raise
        except ServerError:
            if not self._lay_damaged_aside():
                raise
            return set(), set(self._watched)
        if server["run_id"] != self._run_id:  # it may have lost the entries that were seen last
            self._run_id = server["run_id"]
            self._unread |= self._watched.keys()
        return {name for name in self._watched if JobKeys(name).commits in arrived}, set(listed)

    def _lay_damaged_aside(self) -> bool:
        """Lay aside the jobs whose log is no stream, as one fails the read of all. Return whether there were any."""
        names = list(self._watched)
        types = self._store.client.each([("TYPE", JobKeys(name).commits) for name in names])
        damaged = [(name, kind) for name, kind in zip(names, types, strict=True) if kind not in ("stream", "none")]
        for name, kind in damaged:
            self._lay_aside(
                name, f"passed over: key {JobKeys(name).commits} is a {kind}, not a stream: another program wrote there"
            )
        return bool(damaged)

    def _to_be_read(self, listed: set[str]) -> list[str]:
        """Return the names of new jobs, of jobs with new log entries, and of jobs whose aggregator has ended."""
        ended = {name for name, thread in self._threads.items() if not thread.is_alive()}
        for name in ended:
            del self._threads[name]
            if why := self._failed.pop(name, ""):
                self._lay_aside(name, why)
            else:
                self._aside.pop(name, None)
        self._watched = {name: job for name, job in self._watched.items() if name in listed}
        now = time.monotonic()
        # What failed, and then went well for as long as the longest rest, fails anew: its reason is said again.
        self._aside = {
            n: aside for n, aside in self._aside.items() if n in listed and now < aside.until + _MOST_AGAIN_S
        }
        self._unread = {
            name for name, job in self._watched.items() if name in self._unread or _memory_is_gone(job.transport)
        }
        resting = {name for name, aside in self._aside.items() if aside.until > now}
        return sorted(listed - (self._watched.keys() - self._unread | self._threads.keys() | resting))

    # -- one job ----------------------------------------------------------------------------------------------

    def _read(self, name: str) -> None:
        """Watch a job if it is idle, else serve it."""
        before = self._watched.get(name)
        try:
            with readable(name):
                job = self._store.job(name)
                state = job.state()
                if job.config.metadata.publishes:  # its learner makes the versions
                    self._watched.pop(name, None)
                    self._rest(name, _MOST_AGAIN_S)
                    return
                if unlisted := [name for name in job.config.user_code if name not in self._allow]:
                    self._leave(job, unlisted, state.finished(job.config))
                    return
                if state.id not in self._known and not state.finished(job.config):
                    self._announce(job)
                self._known.add(state.id)
                transport = job.access.transport if job.access.transport.seen else None
                watched = _Watched(state.id, state.last_entry, state.version, transport)
                if _memory_is_gone(transport) or not job.access.is_idle():
                    self._serve(job)
                    return
                run_id = job.access.server.run_id() if job.access.client.is_cluster else self._run_id
                if state.run_id != run_id:  # else a worker that joins now would be cut off later
                    if not file_is_whole(job.access.server):
                        self._rest(name, LOOK_S)  # stays watched and unread
                        return
                    known = before.version if before and before.id == state.id else 0
                    begin_history(job.access.server, job.access.scripts, job.name, known)
                self._unread.discard(name)
                self._watched[name] = watched
                self._aside.pop(name, None)
        except JobNotFound:
            self._watched.pop(name, None)
        except (NoServer, ServerLost):
            raise
        except Exception as error:  # whatever is wrong with one job, the others are served
            self._lay_aside(name, f"passed over: {_in_words(error)}")

    def _leave(self, job: Job, unlisted: list[str], is_finished: bool) -> None:
        """Leave a job to other aggregators, because it needs code of its user that is not allowed here."""
        options = " ".join(f"--allow {each}" for each in unlisted)
        why = (
            f"job {job.name} is left to other aggregators: it needs code of its user. To serve it, start one with "
            f"--job {job.name} or with {options}, where that code is"
        )
        self._watched.pop(job.name, None)
        self._rest(job.name, _MOST_AGAIN_S, "" if is_finished else why)

    def _lay_aside(self, name: str, why: str) -> None:
        """Neither watch nor serve a job for a while, which doubles with each try in a row that fails."""
        self._watched.pop(name, None)
        before = self._aside.get(name)
        self._rest(name, min(_MOST_AGAIN_S, 2 * before.rest_s) if before else _AGAIN_S, f"{why} (it is tried again)")

    def _rest(self, name: str, rest_s: float, why: str = "") -> None:
        """Leave a job alone for `rest_s` seconds. Warn why, unless that was the reason before too."""
        before = self._aside.get(name)
        if why and not (before and before.why == why):
            self._warn(why)
        self._aside[name] = _Aside(time.monotonic() + rest_s, rest_s, why)

    def _serve(self, job: Job) -> None:
        self._watched.pop(job.name, None)
        thread = threading.Thread(target=self._run, args=(job,), name=f"kvps-serve-{job.name}")
        self._threads[job.name] = thread
        thread.start()

    def _run(self, job: Job) -> None:
        try:
            with readable(job.name):
                self._aggregator(job).run(until_finished=True, idle_s=_LINGER_S)
        except JobNotFound:
            pass
        except (ServerLost, KeysEvicted) as error:
            self._lost.append(error)
            self._stopped.set()
        except Exception as error:  # whatever is wrong with one job, the others are served
            self._failed[job.name] = f"kvps: error: {_in_words(error)}"


def _in_words(error: Exception) -> str:
    return f"{error}" if isinstance(error, KvpsError) else f"{type(error).__name__}: {error}"


def _memory_is_gone(transport: Transport | None) -> bool:
    """Return whether a job's shared memory is gone: no worker can join until an aggregator has made it anew."""
    return transport is not None and not transport.here
