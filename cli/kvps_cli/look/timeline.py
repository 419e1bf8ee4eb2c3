"""`kvps timeline`: writes what every worker and every shard did, and when, into a file that one can look at."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from kvps_monitor.timeline.recording import Recording, record

from kvps.errors import InvalidSetting
from kvps.job import readable
from kvps_cli import connect, options
from kvps_cli.long_work import LongWork
from kvps_cli.output import say

_PERFETTO, _JSON, _FIGURES = ".perfetto-trace", ".json", (".svg", ".png")
_SUFFIXES = (_PERFETTO, _JSON, *_FIGURES)
_EXTRA = ("perfetto", "google", "matplotlib")  # google.protobuf
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
            help="What to write: .perfetto-trace for ui.perfetto.dev, .json for chrome://tracing, or a figure as "
            ".svg or .png.",
            show_default=False,
        ),
    ],
    last: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", min=1e-3, help="Only the last SECONDS.", rich_help_panel=_WINDOW),
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
    """Write what every worker and every shard of a job did, and when: waiting, fetching, computing, pushing, and each
    update, with the gradients that went into it.

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
    with (
        connect.existing_store(redis) as store,
        readable(job),
        LongWork(quiet) as work,
        work.stage(f"reading the spans of {job}"),
    ):
        found = record(store.job(job))
    if last is not None:
        found = found.last(last)
    elif first is not None or to is not None:
        found = found.making(first, to)
    elif suffix in _FIGURES:
        found = found.newest_rounds(_ROUNDS)
    with LongWork(quiet) as work, work.stage(f"making {out}"):
        content = write(found)
    try:
        out.write_bytes(content)
    except OSError as error:
        raise InvalidSetting(f"--out {out}: {error.strerror}") from None
    if not quiet:
        say(f"{out}: {_what(found)}")


def _writer(suffix: str) -> Callable[[Recording], bytes]:
    """Return what makes the content of a file with this suffix. Raises InvalidSetting if the extra is missing."""
    try:
        from kvps_monitor.timeline.chrome import chrome_trace
        from kvps_monitor.timeline.figure import figure
        from kvps_monitor.timeline.perfetto import perfetto_trace
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _EXTRA:
            raise
        raise InvalidSetting("kvps timeline needs more libraries: pip install 'kvps[timeline]'") from None
    if suffix == _PERFETTO:
        return perfetto_trace
    if suffix == _JSON:
        return lambda found: chrome_trace(found).encode()
    return lambda found: figure(found, suffix[1:])


def _what(found: Recording) -> str:
    """Return what is in the file, in a few words."""
    seconds = (found.end_us - found.start_us) / 1e6
    lanes = f"{_count(len(found.workers), 'worker')} and {_count(len(found.shards), 'shard')}"
    done = f"{_count(found.iterations, 'iteration')}, {_count(len(found.versions), 'version')}"
    return f"{lanes}, {done}, {seconds:.3g} s"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
