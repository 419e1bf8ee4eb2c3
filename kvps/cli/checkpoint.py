"""Checkpoints by hand: save one of a job that goes on, list a directory of them, make a job from one."""

from __future__ import annotations

import sys
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from kvps_aggregator.verify.recording import check_directory
from rich.console import Console
from rich.table import Column, Table

from kvps.cli import connect, options
from kvps.cli.options import DEFAULT_CHECKPOINTS
from kvps.cli.output import say
from kvps.errors import InvalidSetting
from kvps.history import commit_log
from kvps.history.checkpoint import SUFFIX, Checkpoint, listed
from kvps.job import readable
from kvps.protocol.keys import check_name

app = typer.Typer(help="Save jobs in files, and go on from them.", no_args_is_help=True)


@app.command("save")
def save(
    job: options.JobName,
    to: Annotated[
        Path, typer.Option(metavar="FILE|DIR", help=f"A directory, or a file that ends in {SUFFIX}.")
    ] = DEFAULT_CHECKPOINTS,
    redis: options.Redis = None,
) -> None:
    """Save the newest version of a job, without stopping anybody.

    The commit log up to it is copied beside the file; nothing changes in Redis.
    """
    whole = to.suffix == SUFFIX and not to.is_dir()
    directory = check_directory(to.parent if whole else to, "--to")
    with connect.existing_store(redis) as store, readable(job):
        found = store.job(job)
        state = found.state()
        made = found.checkpoint()
        path = directory / (to.name if whole else made.filename)
        made.write(path)
        commit_log.keep(found, directory, state, made.version)
    say(f"job {job}: version {made.version} in {path}")


@app.command("restore")
def restore(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A checkpoint.")],
    job: Annotated[
        str | None, typer.Option("--job", metavar="NAME", help="Name of the new job.  (default: the one in the file)")
    ] = None,
    shards: Annotated[
        int | None, typer.Option(help="Into how many parts the parameters are cut.  (default: as they were)")
    ] = None,
    redis: options.Redis = None,
) -> None:
    """Make a job that goes on from a checkpoint. Its workers join under their old ids."""
    if job is not None:
        check_name("job", job)
    found = Checkpoint.load(file)
    connect.wait_for_server(redis)
    with connect.existing_store(redis) as store:
        made = store.restore_job(found, job, shards)
        awaited = [m.worker for m in made.state().members.values() if m.state != "gone"]
    ids = "".join(f" --id {worker}" for worker in awaited[:1])
    waits = f"; waits for {', '.join(sorted(awaited))}: kvps worker --job {made.name}{ids}" if awaited else ""
    say(f"job {made.name}: goes on from version {found.version} of {file}{waits}")


@app.command("ls")
def ls(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where they are.")] = DEFAULT_CHECKPOINTS,
) -> None:
    """List the checkpoints of a directory. Each is read to its end: whether a bit has flipped is seen."""
    if not directory.is_dir():
        raise InvalidSetting(f"there is no directory {directory}")
    table = Table(
        Column("file", overflow="fold"), "job", "version", "mode", "size", "saved", "state", box=None, pad_edge=False
    )
    for path, found in listed(directory):
        size = f"{path.stat().st_size / 1e6:.1f} MB"
        if found:
            saved = f"{datetime.fromisoformat(found.saved).astimezone():%Y-%m-%d %H:%M:%S}"
            table.add_row(path.name, found.job, str(found.version), found.config.mode, size, saved, "ok")
        else:
            table.add_row(path.name, "-", "-", "-", size, "-", "damaged")
    if table.row_count:
        # Names are no markup; and for a program that reads it a table is as wide as it must be.
        Console(markup=False, emoji=False, width=None if sys.stdout.isatty() else 1000).print(table)
    else:
        say(f"no checkpoints in {directory}: kvps checkpoint save JOB, or --checkpoint-every N")
