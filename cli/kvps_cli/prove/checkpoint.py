"""`kvps checkpoint`: saves a running job, lists the checkpoints in a directory, creates a job from a checkpoint."""

from __future__ import annotations

import glob
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from kvps.config import SPECS
from kvps.errors import InvalidSetting
from kvps.history import commit_log
from kvps.history.checkpoint import Checkpoint
from kvps.history.checkpoint_directory import listed, newest, passed_over
from kvps.history.log_stream import LogStream
from kvps.history.tensor_file import SUFFIX
from kvps.machine.files import writable_directory
from kvps.parsing import bytes_text
from kvps.protocol.keys import check_new_name
from kvps_cli import connect, options
from kvps_cli.long_work import LongWork
from kvps_cli.new_job import storing
from kvps_cli.output import print_json, say
from kvps_cli.tables import print_rows

app = typer.Typer(help="Save jobs in files, and create jobs from them.", no_args_is_help=True, add_completion=False)


@app.command("save")
def save(
    job: options.JobName,
    to: Annotated[
        Path, typer.Option(metavar="FILE|DIR", help=f"A directory, or a file that ends in {SUFFIX}.")
    ] = options.DEFAULT_CHECKPOINTS,
    quiet: options.Quiet = False,
    redis: options.Redis = None,
) -> None:
    """Save the newest version of a job. The job keeps running.

    The commit log up to that version is copied into a file beside the checkpoint. Nothing changes in Redis.
    """
    whole = to.suffix == SUFFIX and not to.is_dir()
    directory = writable_directory("--to", to.parent if whole else to)
    with connect.existing_job(redis, job) as opened, LongWork(quiet) as work:
        state = opened.state()
        nbytes = opened.layout.nbytes * (1 + len(opened.config.slots))
        with work.stage(f"reading version {state.version} ({bytes_text(nbytes)})"):
            checkpoint = opened.checkpoint()
        path = directory / (to.name if whole else checkpoint.filename)
        with work.stage(f"writing {path}", nbytes, "bytes", lambda: _bytes_aside(path)):
            checkpoint.write(path)
        with work.stage("writing the log"):
            commit_log.keep(LogStream(opened.access), directory, state, checkpoint.version)
    if not quiet:
        say(f"job {job}: version {checkpoint.version} in {path}")


def _bytes_aside(path: Path) -> int:
    """Return how many bytes of a checkpoint are written: its file is beside `path` until it is whole."""
    return max((aside.stat().st_size for aside in path.parent.glob(f".{glob.escape(path.name)}.*")), default=0)


@app.command("restore")
def restore(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE|DIR", help="A checkpoint; or a directory, for the newest one of the job that --job names."
        ),
    ],
    job: Annotated[
        str | None,
        typer.Option("--job", metavar="NAME", help="Name of the new job.", show_default="the one in the file"),
    ] = None,
    shards: Annotated[int | None, typer.Option(help=SPECS["shards"].help, show_default="as they were")] = None,
    quiet: options.Quiet = False,
    redis: options.Redis = None,
) -> None:
    """Create a job that continues from a checkpoint. Its workers join under their old ids."""
    if job is not None:
        check_new_name("job", job)
    with LongWork(quiet) as work, work.stage(f"reading {file}"):
        if file.is_dir():
            file, checkpoint = _newest(file, job)
        else:
            checkpoint = Checkpoint.load(file)
    connect.wait_for_server(redis)
    with connect.existing_store(redis) as store:
        with storing(store, checkpoint.layout.nbytes * (1 + len(checkpoint.slots)), quiet):
            restored = store.restore_job(checkpoint, job, shards)
        awaited = [m.worker for m in restored.state().members.values() if m.state != "gone"]
    waits = ""
    if awaited:
        waits = f"; waits for {', '.join(sorted(awaited))}: start {connect.start_of(restored, min(awaited))}"
    if not quiet:
        say(f"job {restored.name}: continues from version {checkpoint.version} of {file}{waits}")


def _newest(directory: Path, job: str | None) -> tuple[Path, Checkpoint]:
    """Return a job's newest checkpoint that can be read. Raises InvalidSetting, CorruptData."""
    if job is None:
        raise InvalidSetting(
            f"{directory} is a directory: give --job too, or one file (kvps checkpoint ls {directory})"
        )
    found = newest(directory, job)
    if found is None:
        raise InvalidSetting(f"no checkpoint of job {job!r} is in {directory}")
    if found.damaged:
        say(passed_over(found))
    return found.path, found.checkpoint


@app.command("ls")
def ls(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Where the checkpoints are.")
    ] = options.DEFAULT_CHECKPOINTS,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
) -> None:
    """List the checkpoints in a directory. Each file is read to its end, so a flipped bit is found."""
    if not directory.is_dir():
        raise InvalidSetting(f"there is no directory {directory}")
    number = len(list(directory.glob(f"[!.]*{SUFFIX}")))
    with LongWork(quiet, as_json) as work, work.stage(f"reading {directory}", number, "files") as stage:
        files = []
        for path, checkpoint in listed(directory):
            files.append(_described(path, checkpoint))
            stage.add()
    if as_json:
        print_json(files)
    elif files:
        print_rows(list(files[0]), map(_row, files), least=("job", "mode", "bytes"))
    else:
        say(f"no checkpoints in {directory}; write one with kvps checkpoint save JOB or --checkpoint-every N")


def _described(path: Path, checkpoint: Checkpoint | None) -> dict[str, Any]:
    """Return a checkpoint file as one JSON object. Of a damaged file, only name and size are known."""
    return {
        "file": path.name,
        "job": checkpoint and checkpoint.job,
        "version": checkpoint and checkpoint.version,
        "mode": checkpoint and checkpoint.config.mode,
        "bytes": path.stat().st_size,
        "saved": checkpoint and checkpoint.saved,
        "state": "ok" if checkpoint else "damaged",
    }


def _row(described: Mapping[str, Any]) -> list[str]:
    """Return the cells of one table row, with the local time."""
    saved = described["saved"]
    shown = dict(described) | {
        "bytes": bytes_text(described["bytes"]),
        "saved": saved and f"{datetime.fromisoformat(saved).astimezone():%Y-%m-%d %H:%M:%S}",
    }
    return ["-" if value is None else str(value) for value in shown.values()]
