"""`kvps jobs`: the jobs of a server."""

from __future__ import annotations

from typing import Any

from kvps_aggregator.aggregator import is_idle

from kvps.cli import connect, options
from kvps.cli.output import print_json, print_rows, say
from kvps.job import Job
from kvps.protocol.job_state import State


def jobs(as_json: options.AsJson = False, redis: options.Redis = None) -> None:
    """List the jobs of the server."""
    passed_over = set[str]()
    with connect.existing_store(redis) as store:
        found = list(connect.all_jobs(store, passed_over, summary))
    if as_json:
        print_json(found)
    elif found:
        columns = ("job", "task", "mode", "workers", "version", "state")
        rows = [one | {"task": one["task"] or "-", "workers": f"{one['active']}/{one['workers']}"} for one in found]
        print_rows(columns, [[str(row[column]) for column in columns] for row in rows])
    elif not passed_over:
        say("no jobs; start one with kvps up digits or kvps create TASK --job NAME")


def summary(job: Job, state: State) -> dict[str, Any]:
    """Return a job as JSON, with the names of the code; `active` is the number of its workers in the vector clock."""
    c = job.config
    return {
        "job": job.name,
        "task": c.task,
        "mode": c.mode,
        "staleness": c.staleness,
        "workers": c.workers,
        "active": active_workers(state),
        "version": state.version,
        "state": job_state(job, state),
    }


def active_workers(state: State) -> int:
    """Return the number of workers in the vector clock."""
    return sum(member.active for member in state.members.values())


def job_state(job: Job, state: State) -> str:
    """Return what a job is doing, in a few words."""
    if state.finished(job.config):
        return "finished"
    if len(state.members) < job.config.workers or is_idle(job):
        return "waits for workers"
    return "runs" if any(job.holders()) else "waits for an aggregator"
