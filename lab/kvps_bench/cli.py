"""The commands of kvps_bench: each measures kvps and what it is compared with, in turns, within one run."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from kvps_cli.output import say
from rich.console import Console
from rich.table import Table

from kvps import optim
from kvps.errors import InvalidSetting
from kvps_bench import (
    diloco,
    goodput,
    idle,
    links,
    peer,
    readers,
    result,
    round,
    scale,
    screen_systems,
    spans,
    straggler,
    transport,
    wake,
    workers,
)
from kvps_bench.crew import Place, place
from kvps_bench.layouts import LAYOUTS
from kvps_bench.roles import LR

app = typer.Typer(
    name="kvps_bench",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Measure kvps and what it is compared with, in turns, within one run.",
    no_args_is_help=True,
)

_TURNS, _QUICK_TURNS = 7, 2
_FEW_TURNS = 3  # of a bench that takes minutes

_LAYOUTS = ",".join(LAYOUTS)

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]
Turns = Annotated[
    int | None, typer.Option("--turns", metavar="N", help=f"Turns that each case has.  (default: {_TURNS})")
]
Quick = Annotated[bool, typer.Option("--quick", help="Few and small turns: a check that the bench works.")]
Transports = Annotated[
    str | None,
    typer.Option(
        "--transport",
        metavar="NAME,...",
        help="tcp or unix; round, scale and readers know shm too.  (default: all of them)",
    ),
]
Workers = Annotated[str, typer.Option("--workers", "-w", metavar="N,...", help="Numbers of workers.")]
Redis = Annotated[
    str | None,
    typer.Option(
        "--redis", envvar="KVPS_REDIS_URL", metavar="URL", help="Measure on this server.  (default: start one)"
    ),
]


@app.command("transport")
def transport_(
    mb: Annotated[float, typer.Option(metavar="MB", help="Size of the array.")] = 40,
    transports: Transports = None,
    turns: Turns = None,
    quick: Quick = False,
    as_json: AsJson = False,
    redis: Redis = None,
) -> None:
    """Measure push and pull of one array, against redis-py's set and get of the same array."""
    nbytes = _bytes_of(mb)

    def run(where: Place, names: list[str], turns: int) -> result.Result:
        return transport.measure(where, names, nbytes, turns)

    _measure(run, redis, transports, turns, quick, as_json)


@app.command("round")
def round_(
    mb: Annotated[str, typer.Option(metavar="MB,...", help="Sizes of the model.")] = "0.04,4,40",
    workers: Workers = "2,4",
    tensors: Annotated[int, typer.Option(metavar="N", help="Into how many arrays the model is divided.")] = 1,
    optimizer: Annotated[str, typer.Option(metavar="NAME[:K=V,...]", help="As for kvps up.")] = "sgd",
    peers: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Measure other systems too. DIR holds the environments torch, ray, mxnet and tf."
        ),
    ] = None,
    transports: Transports = None,
    turns: Turns = None,
    quick: Quick = False,
    as_json: AsJson = False,
    redis: Redis = None,
) -> None:
    """Measure one BSP round of all workers, against bare sockets and other systems."""
    chosen = optim.parse(optimizer, LR if optimizer == "sgd" else None)
    settings = [
        round.Setting(_bytes_of(size), count, _positive("--tensors", tensors), chosen)
        for size in _numbers("--mb", mb)
        for count in _counts("--workers", workers)
    ]
    for setting in settings:
        if setting.tensors > setting.nbytes // 4:
            raise InvalidSetting(f"--tensors {setting.tensors} does not fit into --mb {setting.nbytes / 1e6:g}")
    folder = peer.checked(peers)

    def run(where: Place, names: list[str], turns: int) -> result.Result:
        return round.measure(where, names, settings, turns, quick, folder, say)

    _measure(run, redis, transports, turns, quick, as_json, ("tcp", "unix", "shm"))


@app.command("straggler")
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
    transports: Transports = None,
    turns: Turns = None,
    quick: Quick = False,
    as_json: AsJson = False,
    redis: Redis = None,
) -> None:
    """Measure how long the digits take to an accuracy with slow workers, in BSP, SSP(3) and ASP."""
    if not 0 < accuracy < 1:
        raise InvalidSetting(f"--accuracy must lie between 0 and 1, not {accuracy:g}")
    if not 0 <= compute_ms <= 10_000:
        raise InvalidSetting(f"--compute-ms must be from 0 to 10000, not {compute_ms:g}")
    kinds = _names("--slow", slow, tuple(straggler.KINDS))
    setting = straggler.Setting(accuracy, _positive("--workers", workers), compute_ms)

    def run(where: Place, names: list[str], turns: int) -> result.Result:
        return straggler.measure(where, names, setting, turns, kinds)

    # Which worker waits for which does not depend on the transport, so one transport is enough.
    _measure(run, redis, transports or (None if redis else "unix"), turns, quick, as_json)


@app.command("scale")
def scale_(
    parts: Annotated[
        str, typer.Option("--parts", metavar="NAME,...", help=f"Of: {', '.join(scale.PARTS)}.")
    ] = ",".join(scale.PARTS),
    transports: Transports = None,
    turns: Turns = None,
    quick: Quick = False,
    as_json: AsJson = False,
    redis: Redis = None,
) -> None:
    """Measure many tensors, Adam, and large models and their memory."""
    chosen = _names("--parts", parts, scale.PARTS)

    def run(where: Place, names: list[str], turns: int) -> result.Result:
        return scale.measure(where, names, turns, quick, chosen, say)

    _measure(run, redis, transports, turns, quick, as_json, ("tcp", "unix", "shm"))


@app.command("readers")
def readers_(
    mb: Annotated[float, typer.Option(metavar="MB", help="Size of the model.")] = 40,
    count: Annotated[int, typer.Option("--readers", metavar="N", help="Processes that read.")] = 16,
    replicas: Annotated[
        int,
        typer.Option("--replicas", metavar="N", help="Measure over tcp also beside N replicas, and read from them."),
    ] = 0,
    transports: Transports = None,
    turns: Turns = None,
    quick: Quick = False,
    as_json: AsJson = False,
    redis: Redis = None,
) -> None:
    """Measure a BSP round while many processes of this host read the model again and again, and how old it is."""
    number, setting = _positive("--readers", count), round.Setting(_bytes_of(mb), 2)
    if replicas < 0:
        raise InvalidSetting(f"--replicas must be 0 or more, not {replicas}")
    if replicas and redis:
        raise InvalidSetting("--replicas starts replicas of the bench's own server: leave out --redis")

    def run(where: Place, names: list[str], turns: int) -> result.Result:
        return readers.measure(where, names, setting, number, turns, quick, say, replicas)

    _measure(run, redis, transports, turns, quick, as_json, ("tcp", "unix", "shm"))


@app.command("spans")
def spans_(
    mb: Annotated[str, typer.Option(metavar="MB,...", help="Sizes of the model.")] = "0.04,4",
    workers: Workers = "2",
    transports: Transports = None,
    turns: Turns = None,
    quick: Quick = False,
    as_json: AsJson = False,
    redis: Redis = None,
) -> None:
    """Measure a BSP round while workers and aggregators record spans, over one in which they do not."""
    sizes, counts = _numbers("--mb", mb), _counts("--workers", workers)
    settings = [round.Setting(_bytes_of(size), count) for size in sizes for count in counts]

    def run(where: Place, names: list[str], turns: int) -> result.Result:
        return spans.measure(where, names, settings, turns, quick, say)

    _measure(run, redis, transports, turns, quick, as_json, ("tcp", "unix", "shm"))


@app.command("wake")
def wake_(
    transports: Transports = None,
    turns: Turns = None,
    quick: Quick = False,
    as_json: AsJson = False,
    redis: Redis = None,
) -> None:
    """Measure the time from a commit until a blocked worker is awake, against a bare XREAD woken by an XADD."""

    def run(where: Place, names: list[str], turns: int) -> result.Result:
        return wake.measure(where, names, turns, quick)

    _measure(run, redis, transports, turns, quick, as_json)


@app.command("idle")
def idle_(
    jobs: Annotated[int, typer.Option("--jobs", metavar="N", help="Number of jobs without a worker.")] = 1000,
    turns: Turns = None,
    quick: Quick = False,
    as_json: AsJson = False,
) -> None:
    """Measure what one aggregator costs while no job has a worker, and how soon it serves a job that a worker joins."""
    number = _positive("--jobs", jobs)

    def run(where: Place, names: list[str], turns: int) -> result.Result:
        return idle.measure(where, names, turns, number, quick)

    # The aggregator serves all jobs of its server, so the server must not be a user's.
    _measure(run, None, "unix", turns, quick, as_json)


@app.command("workers")
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
    turns: Annotated[
        int | None, typer.Option("--turns", metavar="N", help=f"Turns that each case has.  (default: {_FEW_TURNS})")
    ] = None,
    quick: Quick = False,
    as_json: AsJson = False,
) -> None:
    """Measure a contribution's cost with few and many workers: bytes, time in scripts, CPU. Starts its own server."""
    settings = workers.settings_of(
        _counts("--workers", counts or (workers.QUICK_WORKERS if quick else workers.WORKERS)),
        _stalenesses(staleness),
        _seconds("--seconds", (0.5 if quick else 10) if seconds is None else seconds),
        _seconds("--limit", limit),
    )

    def run(where: Place, names: list[str], turns: int) -> result.Result:
        return workers.measure(where, settings, turns, say)

    _measure(run, None, "unix", (1 if quick else _FEW_TURNS) if turns is None else turns, quick, as_json)


@app.command("links")
def links_(
    mb: Annotated[float, typer.Option(metavar="MB", help="Size of the model.")] = 40,
    workers: Workers = "2,4",
    gbit: Annotated[str, typer.Option(metavar="RATE,...", help="Rates of the links, in Gbit/s, each way.")] = "1",
    layouts: Annotated[
        str, typer.Option("--layouts", metavar="NAME,...", help=f"Where servers and aggregators are. Of: {_LAYOUTS}.")
    ] = _LAYOUTS,
    peers: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Take PyTorch from DIR/torch.  (default: this Python's, if it has it)"),
    ] = None,
    turns: Turns = None,
    quick: Quick = False,
    as_json: AsJson = False,
) -> None:
    """Measure rounds over hosts whose links have a given rate, against an all-reduce on the same links.

    The hosts are namespaces of this machine: this needs root, or the right to make user namespaces.
    """
    nbytes, counts, rates = _bytes_of(mb), _counts("--workers", workers), _numbers("--gbit", gbit)
    for rate in rates:
        if not 0.001 <= rate <= 1000:
            raise InvalidSetting(f"--gbit must be from 0.001 to 1000, not {rate:g}")
    if max(counts) > links.MOST_WORKERS:
        raise InvalidSetting(f"--workers must be at most {links.MOST_WORKERS}: each has a host of its own")
    chosen, folder = _names("--layouts", layouts, tuple(LAYOUTS)), peer.checked(peers)

    def run(where: Place, names: list[str], turns: int) -> result.Result:
        return links.measure(where, nbytes, counts, rates, chosen, turns, quick, folder, say)

    _measure(run, None, "tcp", turns, quick, as_json)


@app.command("diloco")
def diloco_(
    batches: Annotated[int | None, typer.Option(metavar="N", help="Batches of each worker.  (default: 1500)")] = None,
    local_steps: Annotated[int, typer.Option("--local-steps", metavar="H", help="Steps between two pulls.")] = 50,
    workers: Annotated[int, typer.Option("--workers", "-w", metavar="N", help="Number of workers.")] = 4,
    target: Annotated[float, typer.Option(help="The held-out loss, in nats a character, whose time is taken.")] = 2.6,
    mbit: Annotated[float, typer.Option(metavar="RATE", help="Rate of the links, in Mbit/s, each way.")] = 100,
    lr: Annotated[float, typer.Option(metavar="RATE", help="Learning rate of AdamW, for all.")] = 1e-3,
    outer: Annotated[
        str, typer.Option(metavar="NAME[:K=V,...]", help="The outer optimizer, as --optimizer of kvps up.")
    ] = diloco.OUTER,
    layout: Annotated[str, typer.Option(metavar="NAME", help=f"Of: {_LAYOUTS}.")] = "cluster",
    size: Annotated[
        str, typer.Option(metavar="LAYERS,WIDTH,CONTEXT,BATCH", help="The model, and a worker's batch.")
    ] = "4,192,32,1",
    warm_up: Annotated[
        int, typer.Option("--warm-up", metavar="N", help="Batches of one process before, on which all build.")
    ] = 0,
    against: Annotated[
        str, typer.Option(metavar="NAME,...", help=f"What to compare with. Of: {', '.join(diloco.AGAINST)}.")
    ] = ",".join(diloco.AGAINST),
    quick: Quick = False,
    as_json: AsJson = False,
) -> None:
    """Train a small GPT by local steps, by a gradient a step, and by PyTorch's DistributedDataParallel over gloo.

    The hosts are namespaces of this machine: this needs root, or the right to make user namespaces.
    """
    if not 0.1 <= mbit <= 1_000_000:
        raise InvalidSetting(f"--mbit must be from 0.1 to 1000000, not {mbit:g}")
    if not 2 <= workers <= links.MOST_WORKERS:
        raise InvalidSetting(f"--workers must be from 2 to {links.MOST_WORKERS}, not {workers}: each has its own host")
    if not 2 <= local_steps <= 10_000:
        raise InvalidSetting(f"--local-steps must be from 2 to 10000, not {local_steps}")
    number = 2 * local_steps if quick and batches is None else batches or diloco.BATCHES
    setting = diloco.Setting(
        workers,
        _positive("--batches", number, 1_000_000),
        local_steps,
        target,
        mbit,
        lr,
        optim.parse(outer),
        _names("--layout", layout, tuple(LAYOUTS))[0],
        _size(size),
        0 if quick else _positive("--warm-up", warm_up + 1, 1_000_000) - 1,
        _names("--against", against, tuple(diloco.AGAINST)),
    )

    def run(where: Place, names: list[str], turns: int) -> result.Result:
        return diloco.measure(where, setting, say)

    _measure(run, None, "tcp", 1, quick, as_json)


@app.command("goodput")
def goodput_(
    workers: Annotated[int, typer.Option("--workers", "-w", metavar="N", help="Number of learners.")] = 8,
    quorum: Annotated[int, typer.Option("--quorum", metavar="K", help="As for kvps up, where a case has one.")] = 6,
    grace: Annotated[float, typer.Option("--grace", metavar="SECONDS", help="As for kvps up.")] = 0.02,
    local_steps: Annotated[int, typer.Option("--local-steps", metavar="H", help="Steps between two pulls.")] = 25,
    step_ms: Annotated[float, typer.Option("--step-ms", metavar="MS", help="What a local step takes.")] = 20,
    kill_every: Annotated[
        float, typer.Option("--kill-every", metavar="S", help="Seconds from one kill to the next, on average.")
    ] = 10,
    slow: Annotated[
        float, typer.Option("--slow", metavar="TIMES", help="How many times as slow the slow learner is.")
    ] = 5,
    seconds: Annotated[float | None, typer.Option(metavar="S", help="How long each case is under fire.")] = None,
    cases: Annotated[
        str, typer.Option("--cases", metavar="NAME,...", help=f"Of: {', '.join(goodput.RULES)}.")
    ] = ",".join(goodput.RULES),
    peers: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Measure torchft's DiLoCo too, of the environment DIR/torchft.")
    ] = None,
    turns: Annotated[int | None, typer.Option("--turns", metavar="N", help="Turns of each case.  (default: 1)")] = None,
    quick: Quick = False,
    as_json: AsJson = False,
) -> None:
    """Measure how many samples count while learners and aggregators are killed, and one learner is slow at a time."""
    if not 2 <= quorum <= workers:
        raise InvalidSetting(f"--quorum must be from 2 to --workers {workers}, not {quorum}")
    if not 2 <= local_steps <= 10_000:
        raise InvalidSetting(f"--local-steps must be from 2 to 10000, not {local_steps}")
    for option, value, least, most in (
        ("--grace", grace, 0, 60),
        ("--step-ms", step_ms, 1, 10_000),
        ("--slow", slow, 1, 1000),
    ):
        if not least <= value <= most:
            raise InvalidSetting(f"{option} must be from {least} to {most}, not {value:g}")
    setting = goodput.Setting(
        _positive("--workers", workers, 64),
        quorum,
        int(1000 * grace + 0.5),
        local_steps,
        step_ms,
        _seconds("--kill-every", kill_every),
        slow,
        _seconds("--seconds", (6 if quick else 40) if seconds is None else seconds),
    )
    names, folder = _names("--cases", cases, tuple(goodput.RULES)), peer.checked(peers)

    def run(where: Place, _: list[str], turns: int) -> result.Result:
        return goodput.measure(where, setting, names, turns, folder, say)

    _measure(run, None, "unix", 1 if turns is None else turns, quick, as_json)


@app.command("screens")
def screens_(
    systems: Annotated[
        str | None, typer.Option("--systems", metavar="NAME,...", help="Which to measure.  (default: all of them)")
    ] = None,
    peers: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="DIR holds the environments ray, rq, tensorboard, optuna and torchft."),
    ] = None,
    pictures: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Take pictures of the pages, wide and as wide as a phone.")
    ] = None,
    turns: Annotated[
        int | None, typer.Option("--turns", metavar="N", help=f"Turns that each case has.  (default: {_FEW_TURNS})")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure how soon a live run can be seen, in other systems' pages and in kvps. Needs Chromium and playwright."""
    try:
        from kvps_bench import screens
    except ImportError:
        raise InvalidSetting("screens drives Chromium by playwright: pip install playwright") from None
    all_names = tuple(system.name for system in screen_systems.SYSTEMS)
    names = _names("--systems", systems, all_names) if systems else all_names
    number = _positive("--turns", _FEW_TURNS if turns is None else turns)
    wanted = [system for system in screen_systems.SYSTEMS if system.name in names]
    found = screens.measure(peer.checked(peers), wanted, number, pictures and pictures.absolute(), say)
    if as_json:
        print(json.dumps(found))
    else:
        _print_table("", *screens.table(found))


def _size(text: str) -> dict[str, int]:
    """Return the keywords of `small_gpt.Size` that "4,192,32,1" stands for."""
    numbers = _counts("--size", text)
    if len(numbers) != len(diloco.SIZE) or numbers[1] % 32:
        raise InvalidSetting(f"--size must be {', '.join(diloco.SIZE)}, with a width divisible by 32, not {text!r}")
    return dict(zip(diloco.SIZE, numbers, strict=True))


def _measure(
    run: Callable[[Place, list[str], int], result.Result],
    redis: str | None,
    transports: str | None,
    turns: int | None,
    quick: bool,
    as_json: bool,
    kinds: tuple[str, ...] = ("tcp", "unix"),
) -> None:
    """Measure over the transports asked for, on the server at `redis` or on a new one, and print the result."""
    number = _positive("--turns", (_QUICK_TURNS if quick else _TURNS) if turns is None else turns)
    asked = _names("--transport", transports, kinds) if transports else None
    with place(redis) as where:
        there = [name for name in where.urls if name in kinds]
        for name in asked or ():
            if name not in there:
                raise InvalidSetting(f"--transport {name}: the server of --redis is reached over {', '.join(there)}")
        found = run(where, asked or there, number).to_dict()
    if as_json:
        print(json.dumps(found))
    else:
        _show(found)


def _show(found: dict[str, Any]) -> None:
    console = Console(markup=False, emoji=False, highlight=False)
    for table in [*result.rows_tables(found), result.bars_table(found)]:
        _print_table(*table)
        console.print()
    for note in found["notes"]:
        console.print(note)


def _print_table(title: str, header: list[str], cells: list[list[str]]) -> None:
    console = Console(markup=False, emoji=False, highlight=False)
    if title:
        console.print(title)
    table = Table(*header, box=None, pad_edge=False)
    for row in cells:
        table.add_row(*row)
    console.print(table)


# -- options --------------------------------------------------------------------------------------------------------


def _names(option: str, text: str, allowed: tuple[str, ...]) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in allowed:
            raise InvalidSetting(f"{option} must be of {', '.join(allowed)}, not {name!r}")
    return list(dict.fromkeys(names))


def _numbers(option: str, text: str) -> list[float]:
    try:
        return [float(word) for word in text.split(",")]
    except ValueError:
        raise InvalidSetting(f"{option} must be numbers with commas between them, not {text!r}") from None


def _counts(option: str, text: str) -> list[int]:
    numbers = _numbers(option, text)
    if not all(number.is_integer() for number in numbers):
        raise InvalidSetting(f"{option} must be whole numbers, not {text!r}")
    return [_positive(option, int(number)) for number in numbers]


def _positive(option: str, number: int, most: int = 4096) -> int:
    if not 1 <= number <= most:
        raise InvalidSetting(f"{option} must be from 1 to {most}, not {number}")
    return number


def _stalenesses(text: str) -> list[int]:
    numbers = _numbers("--staleness", text)
    for number in numbers:
        if not (number.is_integer() and -1 <= number <= 1000):
            raise InvalidSetting(f"--staleness must be whole numbers from -1 to 1000, not {text!r}")
    return list(dict.fromkeys(int(number) for number in numbers))


def _seconds(option: str, seconds: float) -> float:
    if not 0.05 <= seconds <= 3600:
        raise InvalidSetting(f"{option} must be from 0.05 to 3600 seconds, not {seconds:g}")
    return seconds


def _bytes_of(mb: float) -> int:
    if not (math.isfinite(mb) and 1e-3 <= mb <= 100_000):
        raise InvalidSetting(f"--mb must be from 0.001 to 100000, not {mb:g}")
    return 4 * int(mb * 250_000)
