"""What the commands of kvps_bench share: options, how they are read, and how a result is printed."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer
from kvps_cli.options import SharedOptions
from rich.console import Console
from rich.table import Table

from kvps.errors import InvalidSetting
from kvps_bench.crew import Lab, place
from kvps_bench.result import Bar, Result, Row, bars_table, machine, rows_tables
from kvps_bench.round import Setting

TURNS, QUICK_TURNS = 7, 2
_MOST = 4096
WITH_SHM = ("tcp", "unix", "shm")

Size = Annotated[float, typer.Option(metavar="MB", help="Size of the model.")]
Sizes = Annotated[str, typer.Option(metavar="MB,...", help="Sizes of the model.")]
Workers = Annotated[str, typer.Option("--workers", "-w", metavar="N,...", help="Numbers of workers.")]
Measure = Callable[[Lab], Iterable[Row | Bar]]


@dataclass
class OnOwnServer(SharedOptions):
    """How a command measures that starts a server of its own, and how it prints the result."""

    turns: Annotated[
        int | None, typer.Option("--turns", metavar="N", help=f"Turns that each case has.  (default: {TURNS})")
    ] = None
    quick: Annotated[bool, typer.Option("--quick", help="Few and small turns: a check that the bench works.")] = False
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False
    transports: str | None = field(init=False, default="unix")
    redis: str | None = field(init=False, default=None)


@dataclass
class OnAnyServer(OnOwnServer):
    """The same over each transport, on a server that runs already or on one of its own."""

    transports: Annotated[
        str | None,
        typer.Option(
            "--transport",
            metavar="NAME,...",
            help="tcp or unix; round, units and readers know shm too.  (default: all of them)",
        ),
    ] = None
    redis: Annotated[
        str | None,
        typer.Option(
            "--redis", envvar="KVPS_REDIS_URL", metavar="URL", help="Measure on this server.  (default: start one)"
        ),
    ] = None


def measured(
    bench: str, measure: Measure, notes: Sequence[str], how: OnOwnServer, kinds: tuple[str, ...] = ("tcp", "unix")
) -> None:
    """Measure over the transports asked for, on the server asked for or on a new one, and print the result."""
    number = positive("--turns", (QUICK_TURNS if how.quick else TURNS) if how.turns is None else how.turns)
    asked = names("--transport", how.transports, kinds) if how.transports else None
    with place(how.redis) as where:
        there = [name for name in where.urls if name in kinds]
        for name in asked or ():
            if name not in there:
                raise InvalidSetting(f"--transport {name}: the server of --redis is reached over {', '.join(there)}")
        found = list(measure(Lab(where, asked or there, number, how.quick)))
        rows, bars = (
            [each for each in found if isinstance(each, Row)],
            [each for each in found if isinstance(each, Bar)],
        )
        figures = Result(bench, number, rows, bars, machine(where.store.client), notes).to_dict()
    if how.as_json:
        print(json.dumps(figures))
    else:
        _show(figures)


def _show(figures: dict[str, Any]) -> None:
    console = Console(markup=False, emoji=False, highlight=False)
    for header, cells in [*rows_tables(figures), bars_table(figures)]:
        table = Table(*header, box=None, pad_edge=False)
        for row in cells:
            table.add_row(*row)
        console.print(table)
        console.print()
    for note in figures["notes"]:
        console.print(note)


# -- options --------------------------------------------------------------------------------------------------------


def names(option: str, text: str, allowed: tuple[str, ...]) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in allowed:
            raise InvalidSetting(f"{option} must be of {', '.join(allowed)}, not {name!r}")
    return list(dict.fromkeys(names))


def numbers(option: str, text: str) -> list[float]:
    try:
        return [float(word) for word in text.split(",")]
    except ValueError:
        raise InvalidSetting(f"{option} must be numbers with commas between them, not {text!r}") from None


def counts(option: str, text: str, least: int = 1) -> list[int]:
    values = numbers(option, text)
    if not all(number.is_integer() for number in values):
        raise InvalidSetting(f"{option} must be whole numbers, not {text!r}")
    return [positive(option, int(number), least) for number in values]


def positive(option: str, number: int, least: int = 1) -> int:
    if not least <= number <= _MOST:
        raise InvalidSetting(f"{option} must be from {least} to {_MOST}, not {number}")
    return number


def settings(mb: str, workers: str) -> list[Setting]:
    """Return the size of a round for each pair of --mb and --workers."""
    sizes, numbers_of_workers = list(map(bytes_of, numbers("--mb", mb))), counts("--workers", workers)
    return [Setting(size, count) for size in sizes for count in numbers_of_workers]


def bytes_of(mb: float) -> int:
    if not (math.isfinite(mb) and 1e-3 <= mb <= 100_000):
        raise InvalidSetting(f"--mb must be from 0.001 to 100000, not {mb:g}")
    return 4 * int(mb * 250_000)
