"""`kvps jobs`: the jobs of a server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvps_monitor import palette
from kvps_monitor.jobs import summary, unreadable

from kvps_cli import connect, options
from kvps_cli.long_work import duration
from kvps_cli.output import loss_text, print_json, say
from kvps_cli.tables import print_rows

_COLUMNS = ("job", "task", "mode", "workers", "version", "versions/s", "loss", "last change", "age", "state")
_LEAST = ("age", "last change", "task", "loss", "versions/s", "mode")  # what a narrow terminal does without


def jobs(as_json: options.AsJson = False, redis: options.Redis = None) -> None:
    """List the jobs of the server."""
    with connect.existing_store(redis) as store:
        summaries = list(store.read_jobs(summary, unreadable))
    if as_json:
        print_json(summaries)
    elif summaries:
        with_rollouts = (*_COLUMNS[:-1], "rollouts", _COLUMNS[-1])
        columns = with_rollouts if any(job.get("rollouts") for job in summaries) else _COLUMNS
        print_rows(columns, (_row(job, columns) for job in summaries), _LEAST)
    else:
        say("no jobs; start one with kvps up digits or kvps create TASK --job NAME")


def _row(job: Mapping[str, Any], columns: Sequence[str]) -> list[str]:
    if "reason" in job:
        return [job["job"], *"-" * (len(columns) - 2), f"{job['state']}: {job['reason']}"]
    shown = {
        "state": palette.job_does(job["state"], job["waits_for"], job["why"]),
        "workers": palette.present(job["state"], job["active"], job["workers"]),
        "version": f"{job['version']:,}",
        "versions/s": f"{job['commits_per_s']:,.1f}",
        "loss": loss_text(job["loss"]),
        "rollouts": palette.experience(job["rollouts"]),
        "last change": f"{duration(job['silent_s'])} ago",
        "age": duration(job["age_s"]),
    }
    return [str(({**job, **shown})[column]) or "-" for column in columns]
