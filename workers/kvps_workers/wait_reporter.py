"""Logs what a worker waits for when it waits long: a worker that prints nothing looks like one that hangs."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from kvps.connection.client import Client
from kvps.errors import KvpsError, ServerLost, counted
from kvps.job import Job
from kvps.parsing import number, whole
from kvps.protocol.job_state import RoundState
from kvps.session.session import Session
from kvps.staleness import ASP

log = logging.getLogger("kvps.worker")

_PATIENCE_S = 2.0
_NAMED = 4  # workers that are behind


class WaitReporter:
    """A watch on one session's waits. It has its own thread, because the worker's thread is the one that waits."""

    def __init__(self, job: Job, session: Session) -> None:
        self._job = job
        self._session = session
        self._since: float | None = None
        self._reported = ""
        self._watched: Job | None = None  # the same job, through a client of this thread's own
        self._undelivered = 0  # chunks of a gradient that had not arrived at the last look
        self._moved = 0.0  # when that number last changed
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name=f"kvps-patience-{session.worker}", daemon=True)

    def __enter__(self) -> WaitReporter:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join(_PATIENCE_S)  # not longer: a lost server may block the thread

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Report the wait if the block takes long."""
        self._since = time.monotonic()
        yield
        self._since = None

    def _watch(self) -> None:
        # Less patient than the worker's own client, so that it reports before that client gives up.
        with self._job.access.client.twin(_PATIENCE_S) as client:
            while not self._stopped.wait(_PATIENCE_S / 4):
                since = self._since
                if since is None or time.monotonic() - since < _PATIENCE_S:
                    continue
                try:
                    reason, about = self._reason(client)
                except ServerLost as lost:
                    reason = about = str(lost)
                except KvpsError:
                    continue  # the worker meets the same error and reports it
                message = f"job {self._job.name}: {self._session.worker} waits: {reason}"
                if about != self._reported and self._since == since:  # a straggler is named once, not every round
                    self._reported = about
                    log.info("%s", message)

    def _reason(self, client: Client) -> tuple[str, str]:
        """Return why the worker waits, and the same without its figures."""
        self._watched = job = self._watched or Job(client, self._job.name)
        round_state, now = job.access.reader.round_state(self._session.worker), time.monotonic()
        if self._undelivered != self._session.undelivered:
            self._undelivered, self._moved = self._session.undelivered, now
        if self._undelivered and round_state.me and round_state.me.pending < job.config.max_pending:
            moves = now - self._moved < _PATIENCE_S
            gradient = f"its gradient {'is on its way' if moves else 'does not get through'} to the server"
            return gradient, gradient
        late = _taken_unit(job) if job.config.unit_rounds else None
        if late and late[1] != self._session.worker:
            unit, worker, seconds = late
            return f"its round waits for unit {unit:,}, which {worker} has had for {seconds:.0f} s", worker
        reasons = self._for_whom(job, round_state)
        return reasons, reasons

    def _for_whom(self, job: Job, round_state: RoundState) -> str:
        me, config = self._session, job.config
        reasons = []
        if round_state.joined < config.workers and not (config.unit_rounds and round_state.version):
            start = "" if config.metadata.launched_by else f": kvps worker --job {job.name}"
            reasons.append(f"{round_state.joined} of {config.workers} workers have joined{start}")
        if config.partial_rounds:
            reasons.append(f"its round waits for a quorum of {config.quorum}")
        waits_for_all = config.staleness != ASP and not config.partial_rounds and not config.unit_rounds
        late, count = _behind(job, me.round - config.staleness) if waits_for_all else ([], 0)
        if count:
            others = f" and {counted(count - len(late), 'other')}" if count > len(late) else ""
            reasons.append(f"{', '.join(late)}{others} {'are' if count > 1 else 'is'} behind")
        if free := [str(shard) for shard, holder in enumerate(job.access.reader.holders()) if not holder]:
            reasons.append(f"no aggregator holds shard {', '.join(free)}: kvps aggregator start")
        return "; ".join(reasons) or "the aggregator is at work on the next version"


def _behind(job: Job, round_: int) -> tuple[list[str], int]:
    """Return the slowest workers in the vector clock that have not pushed round `round_`, and how many there are."""
    pushed = job.access.keys.pushed
    slowest = ("ZRANGEBYSCORE", pushed, "-inf", f"({round_}", "LIMIT", 0, _NAMED)
    names, count, _ = job.access.reader.asked([slowest, ("ZCOUNT", pushed, "-inf", f"({round_}")])
    return list(names), int(count)


def _taken_unit(job: Job) -> tuple[int, str, float] | None:
    """Return the longest-running unit assigned to one worker: its number, the worker, and for how many seconds it has
    it."""
    client, keys = job.access.client, job.access.keys
    taken = client.call("ZRANGE", keys.taken_units, 0, 0, "WITHSCORES")
    if not taken:
        return None
    unit, since_ms = whole(taken[0], "a unit of data"), number(taken[1], "when a unit was taken")
    worker = client.call("HGET", keys.units, taken[0])
    return unit, str(worker or "").partition(" ")[0], max(0.0, job.access.server.seconds() - since_ms / 1000)
