"""`kvps create`: creates a job. Its aggregators and workers may run already or start later."""

from __future__ import annotations

from typing import Annotated

import typer
from kvps_workers import load_task

from kvps.errors import InvalidSetting, counted
from kvps.protocol.keys import check_new_name
from kvps_cli import connect, options
from kvps_cli.new_job import create_job, parameters_of
from kvps_cli.output import say
from kvps_cli.train.settings import TaskOptions


@options.with_shared
def create(
    task: options.TaskName,
    job: Annotated[str, typer.Option("--job", metavar="NAME", help="Name of the new job.")],
    settings: TaskOptions,
    quiet: options.Quiet = False,
    redis: options.Redis = None,
) -> None:
    """Create a job. Its aggregators and workers may run already or start later."""
    check_new_name("job", job)
    loaded = load_task(task)
    config = settings.job_config(task, loaded, quiet)
    if settings.elastic:
        raise InvalidSetting(
            "--workers MIN:MAX is for kvps up, run and submit, which keep workers at work: give the number for which "
            "the job waits; more may join it at any time"
        )
    params = parameters_of(loaded, config, quiet)
    connect.wait_for_server(redis)
    with connect.existing_store(redis) as store:
        created = create_job(store, job, params, config, quiet)
    connect.announce(created, quiet)
    if not quiet:
        waits = counted(config.workers, "worker")
        # An aggregator of every job leaves no trace before it has one, so nobody knows here whether one runs.
        say(f"it waits for {waits}: {connect.start_of(created)}; and for kvps aggregator start, if none runs")
