"""The commands of kvps_bench that measure hosts with links, and fleets of learners."""

from __future__ import annotations

from typing import Annotated

import typer
from kvps_cli.output import say

from kvps import optim
from kvps.errors import InvalidSetting
from kvps_bench import diloco, goodput, links, options, result
from kvps_bench.crew import Place
from kvps_bench.layouts import LAYOUTS
from kvps_bench.options import AsJson, Quick, Turns, Workers

_LAYOUTS = ",".join(LAYOUTS)


def links_(
    mb: Annotated[float, typer.Option(metavar="MB", help="Size of the model.")] = 40,
    workers: Workers = "2,4",
    gbit: Annotated[str, typer.Option(metavar="RATE,...", help="Rates of the links, in Gbit/s, each way.")] = "1",
    layouts: Annotated[
        str, typer.Option("--layouts", metavar="NAME,...", help=f"Where servers and aggregators are. Of: {_LAYOUTS}.")
    ] = _LAYOUTS,
    turns: Turns = None,
    quick: Quick = False,
    as_json: AsJson = False,
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

    def run(where: Place, names: list[str], turns: int) -> result.Result:
        return links.measure(where, nbytes, counts, rates, chosen, turns, quick, say)

    options.measured(run, None, "tcp", turns, quick, as_json)


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
        options.positive("--batches", number, 1_000_000),
        local_steps,
        target,
        mbit,
        lr,
        optim.parse(outer),
        options.names("--layout", layout, tuple(LAYOUTS))[0],
        _size(size),
        0 if quick else options.positive("--warm-up", warm_up + 1, 1_000_000) - 1,
        options.names("--against", against, tuple(diloco.AGAINST)),
    )

    def run(where: Place, names: list[str], turns: int) -> result.Result:
        return diloco.measure(where, setting, say)

    options.measured(run, None, "tcp", 1, quick, as_json)


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
        options.positive("--workers", workers, 64),
        quorum,
        int(1000 * grace + 0.5),
        local_steps,
        step_ms,
        options.seconds("--kill-every", kill_every),
        slow,
        options.seconds("--seconds", (6 if quick else 40) if seconds is None else seconds),
    )
    names = options.names("--cases", cases, tuple(goodput.RULES))

    def run(where: Place, _: list[str], turns: int) -> result.Result:
        return goodput.measure(where, setting, names, turns, say)

    options.measured(run, None, "unix", 1 if turns is None else turns, quick, as_json)


def _size(text: str) -> dict[str, int]:
    """Return the keywords of `small_gpt.Size` that "4,192,32,1" stands for."""
    numbers = options.counts("--size", text)
    if len(numbers) != len(diloco.SIZE) or numbers[1] % 32:
        raise InvalidSetting(f"--size must be {', '.join(diloco.SIZE)}, with a width divisible by 32, not {text!r}")
    return dict(zip(diloco.SIZE, numbers, strict=True))
