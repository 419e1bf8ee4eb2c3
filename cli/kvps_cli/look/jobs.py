"""`kvps jobs`: the jobs of a server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvps_aggregator.aggregator import is_idle
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
    found = list[dict[str, Any]]()

    def unreadable(name: str, error: KvpsError) -> None:
        found.append({"job": name, "state": "unreadable", "reason": str(error)})

    with connect.existing_store(redis) as store:
        for one in connect.all_jobs(store, unreadable, summary):
            found.append(one)  # each at once, so that the rows are in the order of names
    if as_json:
        print_json(found)
    elif found:
        print_rows(_COLUMNS, [_row(one) for one in found])
    else:
        say("no jobs; start one with kvps up digits or kvps create TASK --job NAME")


def _row(one: Mapping[str, Any]) -> list[str]:
    if "reason" in one:
        return [one["job"], *"-" * (len(_COLUMNS) - 2), f"{one['state']}: {one['reason']}"]
    shown = {**one, "task": one["task"] or "-", "workers": f"{one['active']}/{one['workers']}"}
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
        "active": active_workers(state),
        "version": state.version,
        "state": job_state(job, state),
    }


def active_workers(state: State) -> int:
    """Return the number of workers in the vector clock."""
    return sum(member.active for member in state.members.values())


def job_state(job: Job, state: State) -> str:
    """Return what a job is doing, in a few words."""
    return job_word(state, job.config, not is_idle(job), any(job.holders()))
