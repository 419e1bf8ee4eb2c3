"""`kvps jobs`: the jobs of a server."""

from __future__ import annotations

import sys

from kvps_aggregator.aggregator import is_idle
from rich.table import Table

from kvps.cli import connect, options
from kvps.cli.output import plain_console
from kvps.job import Job
from kvps.protocol.job_state import State


def jobs(redis: options.Redis = None) -> None:
    """List the jobs of the server."""
    table = Table("job", "task", "mode", "workers", "version", "state", box=None, pad_edge=False)
    passed_over = set[str]()
    with connect.existing_store(redis) as store:
        for job, state in connect.all_jobs(store, passed_over):
            c = job.config
            active = f"{active_workers(state)}/{c.workers}"
            table.add_row(job.name, c.task or "-", c.mode, active, str(state.version), job_state(job, state))
    if table.row_count:
        plain_console().print(table)
    elif not passed_over:
        print("no jobs: kvps up digits, or kvps create TASK --job NAME", file=sys.stderr)


def active_workers(state: State) -> int:
    return sum(1 for m in state.members.values() if m.state == "active")


def job_state(job: Job, state: State) -> str:
    if state.finished(job.config):
        return "finished"
    if len(state.members) < job.config.workers or is_idle(job):
        return "waits for workers"
    return "runs" if any(job.holders()) else "waits for an aggregator"
