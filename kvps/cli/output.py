"""What a command prints: results on stdout, and lines for a person, errors and the log on stderr."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from kvps.errors import InvalidSetting
from kvps.machine import launcher

_WIDE = 1000  # columns: for a program that reads it a table is as wide as it must be


def say(message: str) -> None:
    """One line for a person, at once."""
    print(message, file=sys.stderr, flush=True)


def plain_console() -> Console:
    """A console for what stands in Redis: names in brackets are no markup, `:100:` is no emoji."""
    return Console(markup=False, emoji=False, width=None if sys.stdout.isatty() else _WIDE)


def print_rows(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table."""
    table = Table(*columns, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    plain_console().print(table)


def print_json(value: Any) -> None:
    """Print one line of JSON."""
    print(json.dumps(value))


# -- the log ------------------------------------------------------------------------------------------------------


def start_log(quiet: bool, verbose: int) -> bool:
    """Show what kvps logs, and say whether the command is to be quiet itself.

    Usually that is what changes hands; with `quiet` only errors; with `verbose` everything, with times, and from 2 on
    details too. A process that kvps up or kvps run has started leaves it to them to speak: it only warns. Raises
    InvalidSetting.
    """
    if quiet and verbose:
        raise InvalidSetting("--quiet and --verbose exclude each other")
    launched = bool(launcher.own())
    level = logging.ERROR if quiet else logging.WARNING if launched else logging.INFO
    if verbose:
        level = logging.INFO if verbose == 1 else logging.DEBUG
    handler = _ToStderr()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s" if verbose else None))
    log = logging.getLogger("kvps")
    log.addHandler(handler)
    log.setLevel(level)
    log.propagate = False
    return quiet or launched


def log_options(quiet: bool, verbose: int) -> list[str]:
    """The options by which a process that this one starts shows as much."""
    return ["--quiet"] if quiet else ["--verbose"] * verbose


class _ToStderr(logging.Handler):
    """Prints to what is stderr at that moment: a live table stands in for it while it is drawn."""

    def emit(self, record: logging.LogRecord) -> None:
        say(self.format(record))
