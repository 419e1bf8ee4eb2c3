"""The line of a job in a list of jobs: what a few small requests say of it."""

from __future__ import annotations

from typing import Any

from kvps.errors import KvpsError
from kvps.job import Job
from kvps.parsing import entry_ms, whole
from kvps.protocol.job_state import State
from kvps_monitor.job_now import FINISHED, JobNow
from kvps_monitor.rates import Lately
from kvps_monitor.spans import Iteration, LearnerLosses, ShardVersion, mean

_VERSIONS = 20  # over which the rate is taken
_NEWEST = 8  # entries of the log, among which the loss is looked for that a learner said
_WORKERS = 16  # the loss is the mean of so many at the most


def summary(job: Job, state: State) -> dict[str, Any]:
    """Return a job as JSON, with the names of the code.

    workers      how many it waits for; 0 if a learner publishes it
    active       its workers in the vector clock, without those whose process has ended with its launcher
    waits_for    the workers that a stalled job waits for, slowest first
    why          who has stopped, suspended or paused it, and why; "" if it goes on
    run          the same in parts, with when
    commits_per_s  versions a second, lately
    rollouts     how many items of experience there are, see `RolloutsNow.brief`; None if none has come
    loss         the mean of the newest losses of its first workers, or what its learner said; None if they say none
    silent_s     seconds since the last version was committed, or a worker came or went
    age_s        seconds since it was created, or since the first worker came, if the log's beginning is in a file
    """
    keys, c, now = job.access.keys, job.config, JobNow.read(job, state)
    some = sorted(state.members)[:_WORKERS]
    shard, began, first, *traces = job.access.client.together(
        [
            ("XREVRANGE", keys.shard_trace(0), "+", "-", "COUNT", _VERSIONS),
            ("HGET", keys.version, "began"),
            ("XRANGE", keys.leases if c.metadata.publishes else keys.commits, "-", "+", "COUNT", 1),
            *(("XREVRANGE", keys.trace(worker), "+", "-", "COUNT", 1) for worker in some),
        ]
    )
    began_ms = (
        whole(began, "the time of the first join") if began else entry_ms(*first[0]) if first else 1000 * now.at_s
    )
    made = [ShardVersion.of(0, (id, fields)) for id, fields in reversed(shard)]
    lately = Lately.of([] if now.state == FINISHED else made, round(1e6 * now.at_s))
    newest = [Iteration.of(worker, entry) for worker, page in zip(some, traces, strict=True) for entry in page]
    losses = [i.loss for i in newest if i.loss is not None] or [loss for _, loss in LearnerLosses(job, _NEWEST).read()][
        -1:
    ]
    return {
        "job": job.name,
        "task": c.metadata.task,
        "mode": c.mode,
        "staleness": c.staleness,
        "optimizer": c.stepped_by,
        "workers": now.workers,
        "active": state.active - len(now.ended),
        "version": state.version,
        "contributions": sum(state.clock.values()),
        "model_bytes": job.layout.nbytes,
        "state": now.state,
        "waits_for": now.waits_for,
        "why": now.why,
        "run": state.run._asdict(),
        "commits_per_s": lately.per_second(),
        "loss": mean(losses) if losses else None,
        "rollouts": rollouts.brief if (rollouts := job.rollouts.if_any()) else None,
        "silent_s": _seconds_since(entry_ms(state.last_entry, {}), now),
        "age_s": _seconds_since(began_ms, now),
    }


def unreadable(name: str, error: KvpsError) -> dict[str, Any]:
    """Return what is there instead of the summary of a job that cannot be read."""
    return {"job": name, "state": "unreadable", "reason": str(error)}


def _seconds_since(ms: float, now: JobNow) -> float:
    return round(max(0.0, now.at_s - ms / 1000), 1)
