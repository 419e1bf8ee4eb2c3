"""The table of all metrics: the one place that knows their names, types, labels and help. Pure."""

from __future__ import annotations

from typing import Literal, NamedTuple

from kvps.protocol.phases import SHARD_PHASES, WORKER_PHASES

Type = Literal["counter", "gauge", "histogram"]
COUNTER: Type = "counter"
GAUGE: Type = "gauge"
HISTOGRAM: Type = "histogram"


class Spec(NamedTuple):
    """A metric. `labels` are the names of its labels, `help` says what its value is."""

    name: str
    type: Type
    labels: tuple[str, ...]
    help: str

    @property
    def series(self) -> set[str]:
        """The names under which Prometheus has it."""
        if self.type == HISTOGRAM:
            return {f"{self.name}_{part}" for part in ("bucket", "sum", "count")}
        return {self.name}


_JOB, _WORKER, _SHARD = ("job",), ("job", "worker"), ("job", "shard")
_SINCE_FIRST_READING = "Counted from what Redis had when this exporter first read the job."
_CAPPED = "Counted from the newest entries that Redis had when this exporter first read the job."

TABLE = (
    Spec("kvps_up", GAUGE, (), "1 while Redis answers. While it is 0, there are no other series of Redis and jobs."),
    Spec("kvps_reading_seconds", GAUGE, (), "How long the last reading of all jobs took."),
    Spec("kvps_jobs_unreadable", GAUGE, (), "Jobs that cannot be read. The log of this exporter has the reasons."),
    Spec("kvps_redis_memory_used_bytes", GAUGE, (), "Memory that Redis uses; of a cluster, all masters together."),
    Spec("kvps_redis_memory_limit_bytes", GAUGE, (), "Redis's maxmemory; 0 is no limit."),
    Spec(
        "kvps_job_info",
        GAUGE,
        ("job", "id", "task", "mode", "transport", "optimizer"),
        "1 for each job, with its settings as labels.",
    ),
    Spec(
        "kvps_job_state",
        GAUGE,
        ("job", "state"),
        "1 for the job's state (runs, stalled, paused, suspended, stopped, finished, all workers left, waits for "
        "workers, waits for an aggregator, waits for a learner), else 0.",
    ),
    Spec("kvps_versions_total", COUNTER, _JOB, "The newest version of the job: how many were committed."),
    Spec(
        "kvps_log_versions_missed_total",
        COUNTER,
        _JOB,
        "Versions whose commit was not in Redis any more when the log was read: an aggregator had moved it into a "
        "file, or deleted it. Staleness, joins, leaves, evictions and rejections in them are not counted.",
    ),
    Spec("kvps_recoveries_total", COUNTER, _JOB, f"Restarts of Redis that lost versions. {_SINCE_FIRST_READING}"),
    Spec("kvps_backlog_contributions", GAUGE, _JOB, "Accepted contributions that wait for their commit."),
    Spec("kvps_learner_loss", GAUGE, _JOB, "What the learner that publishes the job said of its newest version."),
    Spec("kvps_rollouts_waiting", GAUGE, _JOB, "Items of experience that wait for the learner."),
    Spec("kvps_rollouts_taken", GAUGE, _JOB, "Items of experience that the learner has taken, without a fate yet."),
    Spec("kvps_rollouts_trained_total", COUNTER, _JOB, "Items of experience that a version was trained on."),
    Spec("kvps_rollouts_stale_total", COUNTER, _JOB, "Items of experience that were dropped, as too old."),
    Spec("kvps_rollouts_rejected_total", COUNTER, _JOB, "Items of experience that the learner rejected."),
    Spec("kvps_actors", GAUGE, _JOB, "Actors that send the learner experience."),
    Spec("kvps_gradient_norm", GAUGE, _JOB, "Norm of the reduced gradient of the newest version, over all shards."),
    Spec(
        "kvps_evaluation",
        GAUGE,
        (*_JOB, "figure"),
        "A figure of the newest evaluation, as it was reported: loss, accuracy, or what the user calls it.",
    ),
    Spec("kvps_evaluation_version", GAUGE, _JOB, "The version whose weights were evaluated last."),
    Spec("kvps_units", GAUGE, _JOB, "Units of data of the job; 0 if it hands out none."),
    Spec("kvps_units_done_total", COUNTER, _JOB, "Units of data that are committed."),
    Spec("kvps_backup_tasks_total", COUNTER, _JOB, "Units of data that were handed out a second time, as late ones."),
    Spec("kvps_workers_expected", GAUGE, _JOB, "Workers that the job was created for."),
    Spec("kvps_worker_active", GAUGE, _WORKER, "1 while the worker is in the vector clock, 0 once it is not."),
    Spec("kvps_worker_heartbeat_age_seconds", GAUGE, _WORKER, "Time since an active worker's last sign of life."),
    Spec("kvps_contributions_total", COUNTER, _WORKER, "The worker's clock: its contributions that are committed."),
    Spec(
        "kvps_staleness_versions",
        HISTOGRAM,
        _WORKER,
        "Versions between the one that a committed contribution was computed on and the one before its own. "
        + _SINCE_FIRST_READING,
    ),
    Spec(
        "kvps_worker_phase_seconds_total",
        COUNTER,
        (*_WORKER, "phase"),
        f"Time that the worker spent in a phase of its iterations ({', '.join(WORKER_PHASES)}). {_CAPPED}",
    ),
    Spec("kvps_worker_iterations_total", COUNTER, _WORKER, f"Iterations of the worker that were traced. {_CAPPED}"),
    Spec("kvps_worker_pulled_bytes_total", COUNTER, _WORKER, f"Weights that the worker pulled, as encoded. {_CAPPED}"),
    Spec("kvps_worker_pushed_bytes_total", COUNTER, _WORKER, f"Gradients that it pushed, as encoded. {_CAPPED}"),
    Spec("kvps_loss", GAUGE, _WORKER, "The worker's newest loss."),
    Spec("kvps_joins_total", COUNTER, _WORKER, f"Joins of the worker. {_SINCE_FIRST_READING}"),
    Spec("kvps_leaves_total", COUNTER, _WORKER, f"Leaves of the worker. {_SINCE_FIRST_READING}"),
    Spec("kvps_evictions_total", COUNTER, _WORKER, f"Evictions of the worker. {_SINCE_FIRST_READING}"),
    Spec(
        "kvps_rejected_contributions_total",
        COUNTER,
        _WORKER,
        f"Contributions that an aggregator rejected. {_SINCE_FIRST_READING}",
    ),
    Spec(
        "kvps_late_contributions_total",
        COUNTER,
        _WORKER,
        "Contributions that were dropped: their round was over (late=drop), or another had pushed their unit before.",
    ),
    Spec("kvps_shard_held", GAUGE, _SHARD, "1 while an aggregator holds the shard's lease."),
    Spec(
        "kvps_lease_takes_total",
        COUNTER,
        _SHARD,
        "How often an aggregator took the shard. Each take after the first is a failover or a new start.",
    ),
    Spec(
        "kvps_shard_phase_seconds",
        HISTOGRAM,
        (*_SHARD, "phase"),
        f"Time that a version of the shard spent in a phase ({', '.join(SHARD_PHASES)}). {_CAPPED}",
    ),
    Spec("kvps_shard_received_bytes_total", COUNTER, _SHARD, f"Contributions that the holder read. {_CAPPED}"),
    Spec("kvps_shard_stored_bytes_total", COUNTER, _SHARD, f"What the holder sent to Redis. {_CAPPED}"),
)
SPECS = {spec.name: spec for spec in TABLE}


def markdown() -> str:
    """Return the table as it is on the page of monitoring."""
    rows = [f"| `{s.name}` | {s.type} | {', '.join(s.labels) or '-'} | {s.help} |" for s in TABLE]
    return "\n".join(["| metric | type | labels | value |", "| --- | --- | --- | --- |", *rows])
