"""`kvps jobs`: the jobs of a server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvps_monitor.live import job_word

from kvps.errors import KvpsError
from kvps.job import Job
from kvps.protocol.job_state import State
from kvps_cli import connect, options
from kvps_cli.output import print_json, say
from kvps_cli.tables import print_rows

_COLUMNS = ("job", "task", "mode", "workers", "version", "state")


def jobs(as_json: options.AsJson = False, redis: options.Redis = None) -> None:
    """List the jobs of the server."""
    with connect.existing_store(redis) as store:
        summaries = list(store.read_jobs(summary, unreadable))
    if as_json:
        print_json(summaries)
    elif summaries:
        print_rows(_COLUMNS, map(_row, summaries))
    else:
        say("no jobs; start one with kvps up digits or kvps create TASK --job NAME")


def unreadable(name: str, error: KvpsError) -> dict[str, Any]:
    """Return what is there instead of the summary of a job that cannot be read."""
    return {"job": name, "state": "unreadable", "reason": str(error)}


def _row(job: Mapping[str, Any]) -> list[str]:
    if "reason" in job:
        return [job["job"], *"-" * (len(_COLUMNS) - 2), f"{job['state']}: {job['reason']}"]
    shown = {**job, "task": job["task"] or "-", "workers": f"{job['active']}/{job['workers']}"}
    return [str(shown[column]) for column in _COLUMNS]


def summary(job: Job, state: State) -> dict[str, Any]:
    """Return a job as JSON, with the names of the code; `active` is the number of its workers in the vector clock."""
    c = job.config
    return {
        "job": job.name,
        "task": c.task,
        "mode": c.mode,
        "staleness": c.staleness,
        "workers": c.workers,
        "active": state.active,
        "version": state.version,
        "state": job_state(job, state),
    }


def job_state(job: Job, state: State) -> str:
    """Return what a job is doing, in a few words."""
    return job_word(state, job.config, not job.access.is_idle(), any(job.holders()))
