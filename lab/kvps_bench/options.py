"""What the commands of kvps_bench share: options, how they are read, and how a result is printed."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from kvps.errors import InvalidSetting
from kvps_bench import result
from kvps_bench.crew import Place, place

TURNS, QUICK_TURNS = 7, 2
FEW_TURNS = 3  # of a bench that takes minutes

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]
Turns = Annotated[
    int | None, typer.Option("--turns", metavar="N", help=f"Turns that each case has.  (default: {TURNS})")
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


def measured(
    run: Callable[[Place, list[str], int], result.Result],
    redis: str | None,
    transports: str | None,
    turns: int | None,
    quick: bool,
    as_json: bool,
    kinds: tuple[str, ...] = ("tcp", "unix"),
) -> None:
    """Measure over the transports asked for, on the server at `redis` or on a new one, and print the result."""
    number = positive("--turns", (QUICK_TURNS if quick else TURNS) if turns is None else turns)
    asked = names("--transport", transports, kinds) if transports else None
    with place(redis) as where:
        there = [name for name in where.urls if name in kinds]
        for name in asked or ():
            if name not in there:
                raise InvalidSetting(f"--transport {name}: the server of --redis is reached over {', '.join(there)}")
        figures = run(where, asked or there, number).to_dict()
    if as_json:
        print(json.dumps(figures))
    else:
        _show(figures)


def _show(figures: dict[str, Any]) -> None:
    console = Console(markup=False, emoji=False, highlight=False)
    for table in [*result.rows_tables(figures), result.bars_table(figures)]:
        _print_table(*table)
        console.print()
    for note in figures["notes"]:
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


def counts(option: str, text: str) -> list[int]:
    values = numbers(option, text)
    if not all(number.is_integer() for number in values):
        raise InvalidSetting(f"{option} must be whole numbers, not {text!r}")
    return [positive(option, int(number)) for number in values]


def positive(option: str, number: int, most: int = 4096) -> int:
    if not 1 <= number <= most:
        raise InvalidSetting(f"{option} must be from 1 to {most}, not {number}")
    return number


def stalenesses(text: str) -> list[int]:
    values = numbers("--staleness", text)
    for number in values:
        if not (number.is_integer() and -1 <= number <= 1000):
            raise InvalidSetting(f"--staleness must be whole numbers from -1 to 1000, not {text!r}")
    return list(dict.fromkeys(int(number) for number in values))


def seconds(option: str, seconds: float) -> float:
    if not 0.05 <= seconds <= 3600:
        raise InvalidSetting(f"{option} must be from 0.05 to 3600 seconds, not {seconds:g}")
    return seconds


def bytes_of(mb: float) -> int:
    if not (math.isfinite(mb) and 1e-3 <= mb <= 100_000):
        raise InvalidSetting(f"--mb must be from 0.001 to 100000, not {mb:g}")
    return 4 * int(mb * 250_000)
