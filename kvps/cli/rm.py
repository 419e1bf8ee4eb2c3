"""`kvps rm`: removes a job."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from kvps.cli import connect, options
from kvps.cli.jobs import active_workers
from kvps.cli.output import say
from kvps.errors import CorruptData, InvalidSetting, JobNotFound


def rm(
    job: options.JobName,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    redis: options.Redis = None,
) -> None:
    """Remove a job and all its bytes."""
    id: str | None = None  # of a damaged job it is not known
    with connect.existing_store(redis) as store:
        try:
            found, state = connect.read_job(store, job)
            id = found.id
            what = f"job {job} at version {state.version}, with {active_workers(state)} workers in it"
        except CorruptData:
            what = f"job {job}, which is damaged"
        except JobNotFound:
            yes = True  # it was removed before; only if that was cut short is there anything left of it
        if not yes:
            if not sys.stdin.isatty():
                raise InvalidSetting(f"kvps rm asks before it removes job {job!r}: give --yes where nobody can answer")
            typer.confirm(f"Remove {what}?", abort=True)
        store.remove_job(job, id)
    say(f"job {job}: removed")
