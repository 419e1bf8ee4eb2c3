"""Tables on stdout, and other text that is laid out for a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from io import TextIOWrapper
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvps.errors import printable

_WIDE = 1000  # columns: a table that a program reads is never wrapped


class _PlainConsole(Console):
    """A console on which each text that is printed, and each cell of a table, is one line that a person may see."""

    def render_str(self, text: str, **style: Any) -> Text:
        return super().render_str(printable(text).replace("\n", "\\n"), **style)


def plain_console() -> Console:
    """Return a console for text from Redis: names in brackets are not markup, and `:100:` is not an emoji."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal of few characters shows the others as their code
    return _PlainConsole(markup=False, emoji=False, width=None if sys.stdout.isatty() else _WIDE)


def print_rows(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table."""
    table = Table(*columns, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    plain_console().print(table)
