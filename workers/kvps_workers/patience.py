"""Says for whom a worker waits, when it waits long: a worker that prints nothing looks like one that hangs."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from kvps.clocks import ASP
from kvps.errors import KvpsError
from kvps.job import Job
from kvps.session import Session
from kvps.state import State

log = logging.getLogger("kvps.worker")

_PATIENCE_S = 2.0


class Patience:
    """Watches a session's waits on a thread of its own, for the worker's thread is the one that waits."""

    def __init__(self, job: Job, session: Session) -> None:
        self._job = job
        self._session = session
        self._since: float | None = None
        self._said = ""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name=f"kvps-patience-{session.worker}", daemon=True)

    def __enter__(self) -> Patience:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join(_PATIENCE_S)  # not longer: a server that is gone keeps it

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The block may wait for others."""
        self._since = time.monotonic()
        yield
        self._since = None

    def _watch(self) -> None:
        while not self._stopped.wait(_PATIENCE_S / 4):
            since = self._since
            if since is None or time.monotonic() - since < _PATIENCE_S:
                continue
            try:
                message = f"job {self._job.name}: {self._session.worker} waits: {self._for_whom()}"
            except KvpsError:
                continue  # the worker meets the same error, and it can say it
            if message != self._said and self._since == since:  # a straggler is named once, not every round
                self._said = message
                log.info("%s", message)

    def _for_whom(self) -> str:
        job, me = self._job, self._session
        state = job.state()
        reasons = []
        if (joined := len(state.members)) < job.config.workers:
            start = "" if job.config.launched_by else f": kvps worker --job {job.name}"
            reasons.append(f"{joined} of {job.config.workers} workers have joined{start}")
        if late := behind(state, me.round, job.config.staleness):
            reasons.append(f"{', '.join(late)} {'are' if len(late) > 1 else 'is'} behind")
        if free := [str(shard) for shard, holder in enumerate(job.holders()) if not holder]:
            reasons.append(f"no aggregator holds shard {', '.join(free)}: kvps aggregator start")
        return "; ".join(reasons) or "the aggregator is at work on the next version"


def behind(state: State, round_: int, staleness: int) -> list[str]:
    """Who has not even pushed what a worker that has done `round_` rounds must see before its next one."""
    if staleness == ASP:
        return []
    members = sorted(state.members.values(), key=lambda m: m.rank)
    return [m.worker for m in members if m.state != "gone" and m.round + m.pending < round_ - staleness]
