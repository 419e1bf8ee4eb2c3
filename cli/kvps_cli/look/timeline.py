"""`kvps timeline`: writes what every worker and every shard did, and when, into a file that one can look at."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from kvps_monitor.timeline.recording import Recording, record

from kvps.errors import InvalidSetting, counted
from kvps_cli import connect, options
from kvps_cli.long_work import LongWork
from kvps_cli.output import say, write_file

_PERFETTO, _FIGURES = ".perfetto-trace", (".svg", ".png")
_SUFFIXES = (_PERFETTO, *_FIGURES)
_ROUNDS = 12  # of the slowest worker: so many make a figure that one can read
_WINDOW = "Which part"


def timeline(
    job: options.JobName,
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            "-o",
            metavar="FILE",
            help="What to write: .perfetto-trace for ui.perfetto.dev, or a figure as .svg or .png.",
            show_default=False,
        ),
    ],
    last: Annotated[
        float | None, typer.Option(metavar="SECONDS", min=1e-3, help="Only the last SECONDS.", rich_help_panel=_WINDOW)
    ] = None,
    first: Annotated[
        int | None,
        typer.Option("--from", metavar="VERSION", min=0, help="Only from this version on.", rich_help_panel=_WINDOW),
    ] = None,
    to: Annotated[
        int | None,
        typer.Option("--to", metavar="VERSION", min=0, help="Only up to this version.", rich_help_panel=_WINDOW),
    ] = None,
    quiet: options.Quiet = False,
    redis: options.Redis = None,
) -> None:
    """Write what every worker and every shard of a job did, and when.

    It has waiting, fetching, computing, pushing, and each update, with the gradients that went into it. And when
    figures of a version were reported, if any were.

    A figure shows the last 12 rounds of the slowest worker, and a trace all that Redis has, unless you choose a part.
    The job may be running or over.
    """
    suffix = out.suffix
    if suffix not in _SUFFIXES:
        raise InvalidSetting(f"--out must end in {', '.join(_SUFFIXES[:-1])} or {_SUFFIXES[-1]}, not {str(out)!r}")
    if last is not None and (first is not None or to is not None):
        raise InvalidSetting("--last and --from/--to choose two windows: leave one of them out")
    if first is not None and to is not None and first > to:
        raise InvalidSetting(f"--from {first} is after --to {to}")
    options.check_file("--out", out)
    write = _writer(suffix)
    with connect.existing_job(redis, job) as opened, LongWork(quiet) as work, work.stage(f"reading the spans of {job}"):
        recording = record(opened)
    whole = recording
    if last is not None:
        recording = recording.last(last)
    elif first is not None or to is not None:
        recording = recording.making(first, to)
    elif suffix in _FIGURES:
        recording = recording.newest_rounds(_ROUNDS)
    with LongWork(quiet) as work, work.stage(f"making {out}"):
        content = write(recording)
    write_file("--out", out, content)
    if not quiet:
        all_of_it = f"{whole.iterations:,} rounds" if whole.iterations else f"{len(whole.versions):,} versions"
        more = "" if recording is whole else f", of {all_of_it} on record (--last, --from, --to)"
        say(f"{out}: {_summary(recording)}{more}")


def _writer(suffix: str) -> Callable[[Recording], bytes]:
    """Return what makes the content of a file with this suffix. Raises InvalidSetting if the extra is missing."""
    with options.extra("timeline", "kvps timeline needs more libraries", "perfetto", "google", "matplotlib"):
        from kvps_monitor.timeline.figure import figure
        from kvps_monitor.timeline.perfetto import perfetto_trace  # needs google.protobuf too
    if suffix == _PERFETTO:
        return perfetto_trace
    return lambda recording: figure(recording, suffix[1:])


def _summary(recording: Recording) -> str:
    """Return what is in the file, in a few words."""
    seconds = (recording.end_us - recording.start_us) / 1e6
    lanes = counted(len(recording.shards), "shard")
    made = recording.versions
    done = counted(len(made), "version")
    if recording.workers:  # no learner publishes the job
        lanes = f"{counted(len(recording.workers), 'worker')} and {lanes}"
        done = f"{counted(recording.iterations, 'round')}, {done}"
    done += f" ({made[0]:,} to {made[-1]:,})" if len(made) > 1 else ""
    done += f", {counted(len(recording.evaluations), 'evaluation')}" if recording.evaluations else ""
    return f"{lanes}, {done}, {seconds:.3g} s"
