"""The commands of kvps_bench: each measures kvps and what it is compared with, in turns, within one run."""

from __future__ import annotations

from typing import Annotated

import typer
from kvps_cli.options import with_shared

from kvps.errors import InvalidSetting
from kvps_bench import actors, links, options, readers, round, shards, straggler, units, workers
from kvps_bench.options import OnAnyServer, OnOwnServer, Size, Sizes, Workers

app = typer.Typer(
    name="kvps_bench",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Measure kvps and what it is compared with, in turns, within one run.",
    no_args_is_help=True,
)


@app.command("round")
@with_shared
def round_(mb: Sizes = "0.04,4,40", workers: Workers = "2,4", *, how: OnAnyServer) -> None:
    """Measure one BSP round of all workers, against bare sockets."""
    settings = options.settings(mb, workers)
    options.measured("round", lambda lab: round.measure(lab, settings), round.NOTES, how, options.WITH_SHM)


@app.command("straggler")
@with_shared
def straggler_(
    accuracy: Annotated[float, typer.Option(help="Test accuracy of the digits at which the time is taken.")] = 0.95,
    workers: Annotated[int, typer.Option("--workers", "-w", metavar="N", help="Number of workers.")] = 4,
    compute_ms: Annotated[
        float, typer.Option(metavar="MS", min=0, max=10_000, help="Time of a gradient, for a worker that is not slow.")
    ] = 10,
    slow: Annotated[
        str,
        typer.Option("--slow", metavar="NAME,...", help=f"Who is slow, and when. Of: {', '.join(straggler.KINDS)}."),
    ] = ",".join(straggler.KINDS),
    *,
    how: OnAnyServer,
) -> None:
    """Measure the digits with slow workers, in BSP, in rounds of units, in SSP(3) and ASP."""
    if not 0 < accuracy < 1:
        raise InvalidSetting(f"--accuracy must lie between 0 and 1, not {accuracy:g}")
    kinds = options.names("--slow", slow, tuple(straggler.KINDS))
    setting = straggler.Setting(accuracy, options.positive("--workers", workers), compute_ms)
    # Which worker waits for which does not depend on the transport, so one transport is enough.
    how.transports = how.transports or (None if how.redis else "unix")
    notes = straggler.notes(setting)
    options.measured("straggler", lambda lab: straggler.measure(lab, setting, kinds), notes, how)


@app.command("readers")
@with_shared
def readers_(
    mb: Size = 40,
    count: Annotated[int, typer.Option("--readers", metavar="N", help="Processes that read.")] = 16,
    *,
    how: OnAnyServer,
) -> None:
    """Measure a BSP round while many processes of this host read the model again and again, and how old it is."""
    number, setting = options.positive("--readers", count), round.Setting(options.bytes_of(mb), 2)
    options.measured("readers", lambda lab: readers.measure(lab, setting, number), readers.NOTES, how, options.WITH_SHM)


@app.command("units")
@with_shared
def units_(mb: Sizes = "0.04,4", workers: Workers = "2,4", *, how: OnAnyServer) -> None:
    """Measure rounds of units over a static partition, with equally fast workers."""
    settings = options.settings(mb, workers)
    options.measured("units", lambda lab: units.measure(lab, settings), units.NOTES, how, options.WITH_SHM)


@app.command("shards")
@with_shared
def shards_(
    counts: Annotated[str, typer.Option("--shards", metavar="N,...", help="Numbers of shards.")] = shards.SHARDS,
    *,
    how: OnOwnServer,
) -> None:
    """Measure a version's time and commands with few and many shards. Starts its own server."""
    numbers = options.counts("--shards", "1,10,20" if how.quick and counts == shards.SHARDS else counts)
    options.measured("shards", lambda lab: shards.measure(lab, numbers), shards.NOTES, how)


@app.command("workers")
@with_shared
def workers_(
    counts: Annotated[
        str | None,
        typer.Option("--workers", "-w", metavar="N,...", help=f"Numbers of workers.  (default: {workers.WORKERS})"),
    ] = None,
    staleness: Annotated[
        str, typer.Option("--staleness", "-s", metavar="N,...", help="0 is BSP, N is SSP, -1 is ASP.")
    ] = "0,2",
    seconds: Annotated[
        float, typer.Option(metavar="S", min=0.05, max=3600, help="How long contributions are counted.")
    ] = 10,
    limit: Annotated[
        float, typer.Option(metavar="S", min=0.05, max=3600, help="Seconds that joining, or a commit, may take.")
    ] = 120,
    *,
    how: OnOwnServer,
) -> None:
    """Measure a contribution's cost with few and many workers: bytes, time in scripts, CPU. Starts its own server."""
    numbers = options.counts("--workers", counts or (workers.QUICK_WORKERS if how.quick else workers.WORKERS))
    settings = [
        workers.Setting(number, mode, seconds, limit)
        for number in sorted(set(numbers))
        for mode in options.counts("--staleness", staleness, least=-1)
    ]
    options.measured("workers", lambda lab: workers.measure(lab, settings), workers.NOTES, how)


@app.command("actors")
@with_shared
def actors_(
    mb: Size = 500,
    count: Annotated[int, typer.Option("--actors", metavar="N", help="Number of actors.")] = 4,
    share: Annotated[float, typer.Option(min=0, max=1, help="Part of the items that a version changes.")] = 0.01,
    gbit: Annotated[
        str, typer.Option(metavar="RATE,...", help="Rates of the actors' link, in Gbit/s; 0 is the learner's host.")
    ] = "0,1",
    *,
    how: OnOwnServer,
) -> None:
    """Measure from a learner's publish until its last actor has the version: by the difference, whole, as a file."""
    number, rates = options.positive("--actors", count), options.numbers("--gbit", gbit)
    nbytes = options.bytes_of(mb)
    options.measured("actors", lambda lab: actors.measure(lab, nbytes, number, share, rates), actors.NOTES, how)


@app.command("links")
@with_shared
def links_(
    mb: Size = 40,
    workers: Workers = "2,4",
    gbit: Annotated[str, typer.Option(metavar="RATE,...", help="Rates of the links, in Gbit/s, each way.")] = "1",
    *,
    how: OnOwnServer,
) -> None:
    """Measure rounds over hosts whose links have a given rate, and the bytes on them.

    The hosts are namespaces of this machine: this needs root, or the right to make user namespaces.
    """
    nbytes, counts, rates = options.bytes_of(mb), options.counts("--workers", workers), options.numbers("--gbit", gbit)
    for rate in rates:
        if not 0.001 <= rate <= 1000:
            raise InvalidSetting(f"--gbit must be from 0.001 to 1000, not {rate:g}")
    if max(counts) > links.MOST_WORKERS:
        raise InvalidSetting(f"--workers must be at most {links.MOST_WORKERS}: each has a host of its own")
    how.transports = "tcp"
    options.measured("links", lambda lab: links.measure(lab, nbytes, counts, rates), links.NOTES, how)
