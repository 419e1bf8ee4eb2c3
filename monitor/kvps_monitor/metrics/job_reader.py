"""Reads one job again and again, and keeps its totals. Each entry of its log and its traces is read once."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock

from kvps.history.evaluations import Evaluation
from kvps.history.events import EventLog
from kvps.history.rollouts import RolloutsNow
from kvps.job import Job
from kvps_monitor.job_now import JobNow
from kvps_monitor.metrics.totals import JobTotals
from kvps_monitor.spans import Traces


class JobReader:
    """Reads a job on one thread, while others look at `totals`, `now`, `active`, `rollouts` and the newest `evaluation`
    with `lock` held. `active` says of each worker whether it is in the vector clock."""

    def __init__(self, job: Job, lock: Lock) -> None:
        """Raises JobNotFound, CorruptData, ServerLost."""
        state = job.state()
        self.job = job
        self.totals = JobTotals(job.layout.shards, state.begin.version)
        self.now: JobNow | None = None
        self.active: dict[str, bool] = {}
        self.evaluation: Evaluation | None = None
        self.rollouts: RolloutsNow | None = None
        self._lock = lock
        self._events = EventLog(job.access.client, job.access.keys)
        self._traces = Traces(job)

    def read(self, heard: Callable[[], None]) -> None:
        """Read what is new; call `heard` after each answer of a long log. Raises JobNotFound, CorruptData,
        ServerLost."""
        for events in self._events.unread():
            with self._lock:
                self.totals.add_events(events)
            heard()
        state = self.job.state()
        now, evaluation, rollouts = JobNow.read(self.job, state), self.job.evaluation(), self.job.rollouts.if_any()
        # The last request: what a trace has given is counted, whichever call fails.
        iterations, versions = self._traces.read(list(state.members))
        with self._lock:
            totals = self.totals
            totals.versions = max(totals.versions, state.version)
            totals.units_done = max(totals.units_done, state.units_done if self.job.config.units else 0)
            totals.backups = max(totals.backups, now.backups)
            for name, member in state.members.items():
                totals.workers[name].look_at(member)
            for name, new in iterations.items():
                totals.add_iterations(name, new)
            for shard, made in versions.items():
                totals.add_versions(shard, made)
                totals.shards[shard].takes = max(totals.shards[shard].takes, now.terms[shard])
            if rollouts:
                totals.fates = {fate: max(before, getattr(rollouts, fate)) for fate, before in totals.fates.items()}
            self.evaluation, self.rollouts = evaluation, rollouts
            self.now, self.active = now, {name: member.active for name, member in state.members.items()}
