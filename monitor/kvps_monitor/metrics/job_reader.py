"""Reads one job again and again, and keeps its totals. Each entry of its log and its traces is read once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import Any, NamedTuple

from kvps.history.events import EventLog
from kvps.job import Job
from kvps.parsing import number, whole
from kvps_monitor.live import holders_so_far, job_word
from kvps_monitor.metrics.totals import JobTotals
from kvps_monitor.spans import Traces


class JobNow(NamedTuple):
    """What a job is at one instant. `ages` has the seconds since the last sign of life of each active worker."""

    state: str
    backlog: int
    held: list[bool]
    active: dict[str, bool]
    ages: dict[str, float]


class JobReader:
    """Reads a job on one thread, while others look at `totals` and `now` with `lock` held."""

    def __init__(self, job: Job, lock: Lock) -> None:
        """Raises JobNotFound, CorruptData, ServerLost."""
        state = job.state()
        self.job = job
        self.totals = JobTotals(job.layout.shards, state.begin.version)
        self.now: JobNow | None = None
        self._lock = lock
        self._events = EventLog(job.access.client, job.access.keys)
        self._traces = Traces(job)

    def read(self, heard: Callable[[], None]) -> None:
        """Read what is new; call `heard` after each answer of a long log. Raises JobNotFound, CorruptData,
        ServerLost."""
        while events := self._events.unread():
            with self._lock:
                self.totals.add_events(events)
            heard()
        state = self.job.state()
        keys, shards = self.job.access.keys, range(self.job.layout.shards)
        beats, backlog, holders, terms = self.job.access.client.together(
            [
                ("ZRANGE", keys.heartbeat, 0, -1, "WITHSCORES"),
                ("XLEN", keys.inbox),
                ("MGET", *(keys.lease(shard) for shard in shards)),
                ("MGET", *(keys.term(shard) for shard in shards)),
            ]
        )
        active = {name: member.active for name, member in state.members.items()}
        now = JobNow(
            state=job_word(state, self.job.config, bool(beats or backlog), any(holders)),
            backlog=whole(backlog, "the length of the inbox"),
            held=[bool(holder) for holder in holders],
            active=active,
            ages=_ages(beats, self.job.access.server.seconds(), active),
        )
        # The last request: what a trace has given is counted, whichever call fails.
        iterations, versions = self._traces.read(list(state.members))
        with self._lock:
            totals = self.totals
            totals.versions = max(totals.versions, state.version)
            totals.units_done = max(totals.units_done, state.units_done)
            for name, member in state.members.items():
                totals.workers[name].look_at(member)
            for name, new in iterations.items():
                totals.add_iterations(name, new)
            for shard, made in versions.items():
                totals.add_versions(shard, made)
                totals.shards[shard].takes = max(totals.shards[shard].takes, holders_so_far(terms[shard], shard))
            self.now = now


def _ages(beats: Sequence[Any], now_s: float, active: Mapping[str, bool]) -> dict[str, float]:
    """Return the seconds since the last sign of life of each active worker; `beats` is worker, ms, worker, ms, ..."""
    return {
        worker: max(0.0, now_s - number(ms, f"the last sign of life of worker {worker!r}") / 1000)
        for worker, ms in zip(beats[::2], beats[1::2], strict=True)
        if active.get(worker)
    }
