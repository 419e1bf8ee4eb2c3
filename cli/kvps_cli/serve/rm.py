"""`kvps rm`: removes a job."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from kvps.errors import CorruptData, InvalidSetting, JobNotFound, counted
from kvps_cli import connect, options
from kvps_cli.long_work import LongWork
from kvps_cli.output import say


def rm(
    job: options.JobName,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Remove the job without asking.")] = False,
    quiet: options.Quiet = False,
    redis: options.Redis = None,
) -> None:
    """Remove a job and all its data."""
    id: str | None = None  # unknown if the job is damaged
    with connect.existing_store(redis) as store:
        try:
            opened, state = connect.read_job(store, job)
            id = opened.id
            what = f"job {job} at version {state.version}, with {counted(state.active, 'worker')} in it"
        except CorruptData:
            what = f"job {job}, which is damaged"
        except JobNotFound:
            yes = True  # a removal came before; only if it was interrupted is anything left
        if not yes:
            if not sys.stdin.isatty():
                raise InvalidSetting(f"kvps rm asks before removing job {job!r}, but stdin is no terminal: give --yes")
            typer.confirm(f"Remove {what}?", abort=True)
        with LongWork(quiet) as work, work.stage(f"removing job {job}"):
            store.remove_job(job, id)
    if not quiet:
        say(f"job {job}: removed")
