"""What a command prints: results on stdout; messages for people, errors and the log on stderr.

Names, reasons and file names may come from anybody. What a terminal would obey is written as its code here, where text
leaves.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvps.errors import InvalidSetting, printable
from kvps.machine import launcher
from kvps.parsing import json_of

_WIDE = 1000  # columns: a table that a program reads is never wrapped


def say(message: str) -> None:
    """Print one message for people, without delay."""
    print(printable(message), file=sys.stderr, flush=True)


class _PlainConsole(Console):
    """A console on which each text that is printed, and each cell of a table, is one line that a person may see."""

    def render_str(self, text: str, **style: Any) -> Text:
        return super().render_str(printable(text).replace("\n", "\\n"), **style)


def plain_console() -> Console:
    """Return a console for text from Redis: names in brackets are not markup, and `:100:` is not an emoji."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal of few characters shows the others as their code
    return _PlainConsole(markup=False, emoji=False, width=None if sys.stdout.isatty() else _WIDE)


def print_rows(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table."""
    table = Table(*columns, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    plain_console().print(table)


def loss_text(loss: float | None) -> str:
    """Return a loss for a table, "-" for none; one that has grown beyond all use is no wider than others."""
    if loss is None:
        return "-"
    return f"{loss:.4f}" if abs(loss) < 1e6 else f"{loss:.3g}"


def print_json(value: Any) -> None:
    """Print one line of JSON."""
    print(json_of(value))


# -- the log ------------------------------------------------------------------------------------------------------


def start_log(quiet: bool, verbose: int) -> bool:
    """Print the log of kvps, and return whether the command itself must print only results and errors.

    By default it shows INFO, as of kills and failovers, but only warnings in a process that kvps up or kvps run
    started, because they report the rest. With `quiet` it shows only errors, with `verbose` INFO with times, and from 2
    on DEBUG too. Raises InvalidSetting.
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
    """Return the options that make a process which this one starts log as much as this one."""
    return ["--quiet"] if quiet else ["--verbose"] * verbose


class _ToStderr(logging.Handler):
    """A handler that looks up sys.stderr for each record, because a live table replaces it while it is drawn."""

    def emit(self, record: logging.LogRecord) -> None:
        say(self.format(record))
