"""`kvps create`: creates a job. Its aggregators and workers may run already or start later."""

from __future__ import annotations

from typing import Annotated

import numpy as np
import typer
from kvps_workers import load_task

from kvps.protocol.keys import check_name
from kvps_cli import connect, options
from kvps_cli.long_work import LongWork, store_stage
from kvps_cli.output import say
from kvps_cli.train.settings import TaskOptions, with_settings


@with_settings
def create(
    task: options.TaskName,
    job: Annotated[str, typer.Option("--job", metavar="NAME", help="Name of the new job.")],
    settings: TaskOptions,
    quiet: options.Quiet = False,
    redis: options.Redis = None,
) -> None:
    """Create a job. Its aggregators and workers may run already or start later."""
    check_name("job", job)
    found = load_task(task)
    config = settings.job_config(task, found)
    with LongWork(quiet) as work, work.stage(f"making the parameters of {task}"):
        params = found.parameters(config.seed)
    connect.wait_for_server(redis)
    with connect.existing_store(redis) as store:
        nbytes = sum(np.asarray(array).nbytes for array in params.values())
        with LongWork(quiet) as work, store_stage(work, store, nbytes):
            store.create_job(job, params, config=config)
    if quiet:
        return
    if settings.topology:
        say(settings.topology)
    say(f"job {job}: {task}, {config.mode}, {config.workers} workers, {config.optimizer}")
