"""The commands of kvps_bench: each measures kvps and what it is compared with, in turns, within one run."""

from __future__ import annotations

from typing import Annotated

import typer
from kvps_cli.options import with_shared
from kvps_cli.output import say

from kvps import optim
from kvps.errors import InvalidSetting
from kvps_bench import links, options, readers, round, scale, shards, straggler, transport, units, wake, workers
from kvps_bench.layouts import LAYOUTS
from kvps_bench.options import InFewTurns, OnAnyServer, OnOwnServer, Size, Sizes, Workers
from kvps_bench.roles import LR

app = typer.Typer(
    name="kvps_bench",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Measure kvps and what it is compared with, in turns, within one run.",
    no_args_is_help=True,
)


def _settings(mb: str, workers: str) -> list[round.Setting]:
    """Return the size of a round for each size of a model and number of workers."""
    sizes, counts = options.numbers("--mb", mb), options.counts("--workers", workers)
    return [round.Setting(options.bytes_of(size), count) for size in sizes for count in counts]


@app.command("transport")
@with_shared
def transport_(
    mb: Annotated[float, typer.Option(metavar="MB", help="Size of the array.")] = 40, *, how: OnAnyServer
) -> None:
    """Measure push and pull of one array, against redis-py's set and get of the same array."""
    nbytes = options.bytes_of(mb)
    options.measured(lambda where, names, turns: transport.measure(where, names, nbytes, turns), how)


@app.command("round")
@with_shared
def round_(
    mb: Sizes = "0.04,4,40",
    workers: Workers = "2,4",
    tensors: Annotated[int, typer.Option(metavar="N", help="Into how many arrays the model is divided.")] = 1,
    optimizer: Annotated[str, typer.Option(metavar="NAME[:K=V,...]", help="As for kvps up.")] = "sgd",
    *,
    how: OnAnyServer,
) -> None:
    """Measure one BSP round of all workers, against bare sockets and other systems."""
    chosen = optim.parse(optimizer, LR if optimizer == "sgd" else None)
    settings = [
        round.Setting(options.bytes_of(size), count, options.positive("--tensors", tensors), chosen)
        for size in options.numbers("--mb", mb)
        for count in options.counts("--workers", workers)
    ]
    for setting in settings:
        if setting.tensors > setting.nbytes // 4:
            raise InvalidSetting(f"--tensors {setting.tensors} does not fit into --mb {setting.nbytes / 1e6:g}")
    options.measured(
        lambda where, names, turns: round.measure(where, names, settings, turns, how.quick, say), how, options.WITH_SHM
    )


@app.command("straggler")
@with_shared
def straggler_(
    accuracy: Annotated[float, typer.Option(help="Test accuracy of the digits at which the time is taken.")] = 0.95,
    workers: Annotated[int, typer.Option("--workers", "-w", metavar="N", help="Number of workers.")] = 4,
    compute_ms: Annotated[
        float, typer.Option("--compute-ms", metavar="MS", help="Time of a gradient, for a worker that is not slow.")
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
    if not 0 <= compute_ms <= 10_000:
        raise InvalidSetting(f"--compute-ms must be from 0 to 10000, not {compute_ms:g}")
    kinds = options.names("--slow", slow, tuple(straggler.KINDS))
    setting = straggler.Setting(accuracy, options.positive("--workers", workers), compute_ms)
    # Which worker waits for which does not depend on the transport, so one transport is enough.
    how.transports = how.transports or (None if how.redis else "unix")
    options.measured(lambda where, names, turns: straggler.measure(where, names, setting, turns, kinds), how)


@app.command("scale")
@with_shared
def scale_(
    parts: Annotated[
        str, typer.Option("--parts", metavar="NAME,...", help=f"Of: {', '.join(scale.PARTS)}.")
    ] = ",".join(scale.PARTS),
    *,
    how: OnAnyServer,
) -> None:
    """Measure many tensors, Adam, and large models and their memory."""
    chosen = options.names("--parts", parts, scale.PARTS)
    options.measured(
        lambda where, names, turns: scale.measure(where, names, turns, how.quick, chosen, say), how, options.WITH_SHM
    )


@app.command("readers")
@with_shared
def readers_(
    mb: Size = 40,
    count: Annotated[int, typer.Option("--readers", metavar="N", help="Processes that read.")] = 16,
    replicas: Annotated[
        int,
        typer.Option("--replicas", metavar="N", help="Measure over tcp also beside N replicas, and read from them."),
    ] = 0,
    *,
    how: OnAnyServer,
) -> None:
    """Measure a BSP round while many processes of this host read the model again and again, and how old it is."""
    number, setting = options.positive("--readers", count), round.Setting(options.bytes_of(mb), 2)
    if replicas < 0:
        raise InvalidSetting(f"--replicas must be 0 or more, not {replicas}")
    if replicas and how.redis:
        raise InvalidSetting("--replicas starts replicas of the bench's own server: leave out --redis")
    options.measured(
        lambda where, names, turns: readers.measure(where, names, setting, number, turns, how.quick, say, replicas),
        how,
        options.WITH_SHM,
    )


@app.command("units")
@with_shared
def units_(mb: Sizes = "0.04,4", workers: Workers = "2,4", *, how: OnAnyServer) -> None:
    """Measure rounds of units over a static partition, with equally fast workers."""
    settings = _settings(mb, workers)
    options.measured(
        lambda where, names, turns: units.measure(where, names, settings, turns, how.quick, say), how, options.WITH_SHM
    )


@app.command("shards")
@with_shared
def shards_(
    counts: Annotated[str, typer.Option("--shards", metavar="N,...", help="Numbers of shards.")] = shards.SHARDS,
    *,
    how: OnOwnServer,
) -> None:
    """Measure a version's time and commands with few and many shards. Starts its own server."""
    numbers = options.counts("--shards", "1,10,20" if how.quick and counts == shards.SHARDS else counts)
    options.measured(lambda where, names, turns: shards.measure(where, numbers, turns, how.quick, say), how)


@app.command("wake")
@with_shared
def wake_(how: OnAnyServer) -> None:
    """Measure the time from a commit until a blocked worker is awake, against a bare XREAD woken by an XADD."""
    options.measured(lambda where, names, turns: wake.measure(where, names, turns, how.quick), how)


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
        float | None, typer.Option(metavar="S", help="How long contributions are counted.  (default: 10)")
    ] = None,
    limit: Annotated[
        float, typer.Option(metavar="S", help="Seconds that joining, or a commit, may take; then the case fails.")
    ] = 120,
    *,
    how: InFewTurns,
) -> None:
    """Measure a contribution's cost with few and many workers: bytes, time in scripts, CPU. Starts its own server."""
    settings = workers.settings_of(
        options.counts("--workers", counts or (workers.QUICK_WORKERS if how.quick else workers.WORKERS)),
        options.stalenesses(staleness),
        options.seconds("--seconds", (0.5 if how.quick else 10) if seconds is None else seconds),
        options.seconds("--limit", limit),
    )
    options.measured(lambda where, names, turns: workers.measure(where, settings, turns, say), how)


@app.command("links")
@with_shared
def links_(
    mb: Size = 40,
    workers: Workers = "2,4",
    gbit: Annotated[str, typer.Option(metavar="RATE,...", help="Rates of the links, in Gbit/s, each way.")] = "1",
    layouts: Annotated[
        str,
        typer.Option(
            "--layouts", metavar="NAME,...", help=f"Where servers and aggregators are. Of: {','.join(LAYOUTS)}."
        ),
    ] = ",".join(LAYOUTS),
    *,
    how: OnOwnServer,
) -> None:
    """Measure rounds over hosts whose links have a given rate, against an all-reduce on the same links.

    The hosts are namespaces of this machine: this needs root, or the right to make user namespaces.
    """
    nbytes, counts, rates = options.bytes_of(mb), options.counts("--workers", workers), options.numbers("--gbit", gbit)
    for rate in rates:
        if not 0.001 <= rate <= 1000:
            raise InvalidSetting(f"--gbit must be from 0.001 to 1000, not {rate:g}")
    if max(counts) > links.MOST_WORKERS:
        raise InvalidSetting(f"--workers must be at most {links.MOST_WORKERS}: each has a host of its own")
    chosen = options.names("--layouts", layouts, tuple(LAYOUTS))
    how.transports = "tcp"
    options.measured(
        lambda where, names, turns: links.measure(where, nbytes, counts, rates, chosen, turns, how.quick, say), how
    )
