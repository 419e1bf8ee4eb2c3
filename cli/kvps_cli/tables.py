"""Tables on stdout, and other text that is laid out for a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from io import TextIOWrapper
from typing import Any

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from kvps.errors import printable

_WIDE = 1000  # columns: a table that a program reads is never wrapped
_WIDEST = 100  # columns of a cell, if it is not a row's last: no name that kvps gives is as long
_NEVER_CUT = 24  # columns: numbers and short names are whole, or the rows are printed one value a line
_GAP = "  "


class _PlainConsole(Console):
    """A console on which each text that is printed is one line that a person may see."""

    def render_str(self, text: str, **style: Any) -> Text:
        return super().render_str(_plain(text), **style)


def _plain(text: str) -> str:
    return printable(text).replace("\n", "\\n")


def plain_console() -> Console:
    """Return a console for text from Redis: names in brackets are not markup, and `:100:` is not an emoji."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal of few characters shows the others as their code
    return _PlainConsole(markup=False, emoji=False, width=None if sys.stdout.isatty() else _WIDE)


def print_rows(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table that is no wider than the terminal. Long cells are cut; if that does not do, each value gets a line
    of its own."""
    console = plain_console()
    table = [list(map(_plain, row)) for row in (columns, *rows)]
    whole = [max(map(cell_len, column)) for column in zip(*table, strict=True)]
    *widths, last = whole
    fitted = _fitted([*(min(_WIDEST, width) for width in widths), last], console.width)
    if fitted:
        lines = [_GAP.join(map(_cell, row, fitted)).rstrip() for row in table]
    else:
        titles = [_cell(name, max(map(cell_len, table[0]))) for name in table[0]]
        records = [[f"{title}{_GAP}{value}" for title, value in zip(titles, row, strict=True)] for row in table[1:]]
        lines = [_cell(line, console.width).rstrip() for record in records for line in (*record, "")][:-1]
    for number, line in enumerate(lines):
        style = "bold" if fitted and not number else ""
        console.print(Text(line, style), soft_wrap=True)


def _fitted(widths: list[int], room: int) -> list[int]:
    """Return the widths of columns that fit side by side: the widest are narrowed. Return [] if cells would be cut that
    must not be."""
    excess = sum(widths) + len(_GAP) * (len(widths) - 1) - room
    for _ in range(excess):
        widest = max(widths)
        if widest <= _NEVER_CUT:
            return []
        widths[widths.index(widest)] -= 1
    return widths


def _cell(text: str, width: int) -> str:
    """Return a text as wide as its column, cut if it is longer."""
    return set_cell_size(text, width) if cell_len(text) <= width else f"{set_cell_size(text, width - 1)}\u2026"
