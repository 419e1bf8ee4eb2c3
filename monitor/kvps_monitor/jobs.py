"""The line of a job in a list of jobs: what a few small requests say of it."""

from __future__ import annotations

from typing import Any

from kvps.errors import KvpsError
from kvps.job import Job
from kvps.protocol.job_state import Entry, State
from kvps_monitor.live import job_word
from kvps_monitor.spans import Iteration, ShardVersion, mean

_WINDOW_S = 10.0
_VERSIONS = 20  # over which the rate is taken, if they are not older than the window
_WORKERS = 16  # the loss is the mean of so many at the most


def summary(job: Job, state: State) -> dict[str, Any]:
    """Return a job as JSON, with the names of the code.

    active       its workers in the vector clock
    commits_per_s  versions a second, lately; None if the job records no spans
    loss         the mean of the newest losses of its first workers; None if they say none
    silent_s     seconds since the last version was committed, or a worker came or went
    age_s        seconds since it was created, or since the first worker came, if the log's beginning is in a file
    """
    keys, c = job.access.keys, job.config
    shard, began, first, *traces = job.access.client.together(
        [
            ("XREVRANGE", keys.shard_trace(0), "+", "-", "COUNT", _VERSIONS),
            ("HGET", keys.version, "began"),
            ("XRANGE", keys.commits, "-", "+", "COUNT", 1),
            *(("XREVRANGE", keys.trace(worker), "+", "-", "COUNT", 1) for worker in sorted(state.members)[:_WORKERS]),
        ]
    )
    now_s = job.access.server.seconds()
    began_s = int(began) / 1000 if began else _seconds(first[0]) if first else now_s
    made = [ShardVersion.of(0, (id, fields)).at_us / 1e6 for id, fields in shard]
    newest = [
        Iteration.of(w, (id, f)) for w, page in zip(sorted(state.members), traces, strict=False) for id, f in page
    ]
    losses = [i.loss for i in newest if i.loss is not None]
    return {
        "job": job.name,
        "task": c.task,
        "mode": c.mode,
        "staleness": c.staleness,
        "optimizer": str(c.optimizer),
        "workers": c.workers,
        "active": state.active,
        "version": state.version,
        "contributions": sum(state.clock.values()),
        "model_bytes": job.layout.nbytes,
        "state": job_word(state, c, not job.access.is_idle(), any(job.holders())),
        "commits_per_s": _rate([now_s - at_s for at_s in made]) if c.records_spans else None,
        "loss": mean(losses) if losses else None,
        "silent_s": round(max(0.0, now_s - _seconds((state.last_entry, {}))), 1),
        "age_s": round(max(0.0, now_s - began_s), 1),
    }


def unreadable(name: str, error: KvpsError) -> dict[str, Any]:
    """Return what is there instead of the summary of a job that cannot be read."""
    return {"job": name, "state": "unreadable", "reason": str(error)}


def _rate(ages_s: list[float]) -> float:
    """Return versions a second, from how long ago the newest ones were made, newest first."""
    recent = [age for age in ages_s if age < _WINDOW_S]
    if len(recent) == _VERSIONS and recent[-1] > recent[0]:
        return (len(recent) - 1) / (recent[-1] - recent[0])
    return len(recent) / _WINDOW_S


def _seconds(entry: Entry) -> float:
    return int(entry[0].partition("-")[0]) / 1000
