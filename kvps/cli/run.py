"""`kvps run`: server, aggregator and copies of a user's script, watched until all have ended."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from kvps import launch
from kvps.cli import connect, options
from kvps.cli.progress import (
    LOOK_S,
    Display,
    Figures,
    aggregate,
    check_aggregators,
    check_killed,
    check_trained,
    finish,
    follow,
)
from kvps.cli.supervise import Child, Supervisor
from kvps.config import JobConfig
from kvps.errors import InvalidSetting, JobNotFound, KvpsError
from kvps.job import Job
from kvps.protocol.keys import check_name
from kvps.protocol.scripts import job_exists
from kvps.store import Store, fresh_id

_LAST_S = 5.0  # for the others, when who makes the job has ended without it


@options.with_settings
def run(
    settings: options.JobSettings,
    command: Annotated[
        list[str] | None, typer.Argument(metavar="COMMAND...", help="As in: python train.py --rounds 500")
    ] = None,
    job: Annotated[
        str | None, typer.Option("--job", metavar="NAME", help="Name of the job.  (default: the script's)")
    ] = None,
    aggregators: Annotated[int, typer.Option(metavar="N", help="How many aggregators: all but one stand by.")] = 1,
    record: options.Record = None,
    checkpoint_every: options.CheckpointEvery = None,
    checkpoints: options.CheckpointDirectory = options.DEFAULT_CHECKPOINTS,
    keep: options.Keep = 3,
    redis: options.Redis = None,
    listen: options.Listen = None,
    data_dir: options.DataDir = None,
) -> None:
    """Run copies of a script of your own as the workers of one job: what torchrun is for DDP.

    The script says kvps.from_env(), and makes the job; of its settings those that are given here hold.
    """
    command = _checked(command or [])
    check_aggregators(aggregators)
    if job is not None:
        check_name("job", job)
    kept = options.kept_options(record, options.checkpoints_of(checkpoint_every, checkpoints, keep))
    told = {name: value for name, value in settings.given.items() if name != "workers"}
    JobConfig(workers=settings.workers, **told)
    with connect.serving_store(redis, listen, data_dir, joinable=False) as store:
        if job in store.jobs():
            raise job_exists(str(job))
        name = job or store.free_name(_name_of(command))
        made, copies = _run(store, name, command, settings.workers, told, aggregators, kept)
        if made is None:
            if failed := ", ".join(copy.name for copy in copies if copy.failed):
                raise KvpsError(f"the run ends: {failed} failed before a job was made")
            raise KvpsError(
                "all copies ended, and no job was made: does the script call kvps.from_env() and its create_job?"
            )
        version = made.state().version
        if version:
            print(Figures.of(made, version))
    check_trained(name, version, copies)
    check_killed(name, copies)


def _checked(command: Sequence[str]) -> list[str]:
    """The command, its program with its path. Raises InvalidSetting."""
    if not command:
        raise InvalidSetting("there is nothing to run: kvps run -w 4 -- python train.py")
    program = shutil.which(command[0])
    if program is None:
        script = Path(command[0]).suffix == ".py"
        raise InvalidSetting(
            f"there is no program {command[0]!r} to run" + (f": kvps run -- python {command[0]}" if script else "")
        )
    return [program, *command[1:]]


def _name_of(command: Sequence[str]) -> str:
    """What a job is called that trains this: train of python -u sub/train.py."""
    scripts = [word for word in command if word.endswith(".py")] or command
    return re.sub(r"[^A-Za-z0-9_-]+", "-", Path(scripts[0]).stem).strip("-") or "run"


def _run(
    store: Store,
    name: str,
    command: Sequence[str],
    workers: int,
    settings: Mapping[str, Any],
    aggregators: int,
    kept: Sequence[str],
) -> tuple[Job | None, list[Child]]:
    """Run the copies until they have ended: the job that they made, and they."""
    id = fresh_id()
    supervisor = Supervisor(store, "kvps run", lambda: _found(store, name, id))
    try:
        serving = aggregate(supervisor, name, aggregators, kept)
        copies = []
        for rank in range(workers):
            # What Python prints into a pipe would stay in its buffer.
            told = {"PYTHONUNBUFFERED": "1"} | launch.of_copy(rank, workers, name, id, settings)
            copies.append(supervisor.run(f"w{rank}", command, told))
        job = _job_made(supervisor, copies)
        if job:
            with Display(job, {}) as display:
                follow(supervisor, job, serving, copies, display)
            for line in finish(supervisor, job, serving):
                display.message(line)
        return job, copies
    finally:
        supervisor.end()
        _show(supervisor)


def _found(store: Store, name: str, id: str) -> Job | None:
    """The job of that name, if it is there and has this id; another run's is not taken for it."""
    with suppress(JobNotFound):
        job = store.job(name)
        return job if job.id == id else None
    return None


def _job_made(supervisor: Supervisor, copies: Sequence[Child]) -> Job | None:
    """The job, once the first copy has made it; None if that cannot come any more."""
    while True:
        failed = any(copy.failed for copy in copies)
        over = failed or copies[0].done
        if over and not failed:  # the others wait for its job, or are about to end too
            supervisor.await_end([copy.name for copy in copies], _LAST_S)
        job = supervisor.job  # looked for behind that: who ended may have made it
        if job or over:
            return job
        supervisor.watch(LOOK_S)
        _show(supervisor)


def _show(supervisor: Supervisor) -> None:
    for line in supervisor.said():
        print(line, flush=True)
