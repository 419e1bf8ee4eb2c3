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
from kvps.parsing import LONGEST_NAME

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


def print_rows(columns: Sequence[str], rows: Iterable[Sequence[str]], least: Sequence[str] = ()) -> None:
    """Print a table that is no wider than the terminal.

    Cells that are longer than any name are cut first. Then the columns in `least` are left out, one by one, then long
    cells are cut. If nothing does, each value gets a line of its own: short ones are never cut.
    """
    console = plain_console()
    table = [list(map(_plain, row)) for row in (columns, *rows)]
    widths = [max(map(cell_len, column)) for column in zip(*table, strict=True)]
    for shortest in (LONGEST_NAME, _NEVER_CUT):
        for number in range(len(least) + 1):
            shown = [i for i, name in enumerate(columns) if name not in least[:number]]
            if fitted := _fitted([widths[i] for i in shown], console.width, shortest):
                for line, row in enumerate(table):
                    text = _GAP.join(_cell(row[i], width) for i, width in zip(shown, fitted, strict=True))
                    console.print(Text(text.rstrip(), "" if line else "bold"), soft_wrap=True)
                if number:
                    console.print(Text(f"a wider terminal shows {', '.join(least[:number])} too", "dim"))
                return
    _print_records(console, table)


def _print_records(console: Console, table: Sequence[Sequence[str]]) -> None:
    titles, *rows = table
    width = max(map(cell_len, titles))
    for number, row in enumerate(rows):
        lines = [f"{_cell(title, width)}{_GAP}{value}" for title, value in zip(titles, row, strict=True)]
        for line in ["", *lines] if number else lines:
            console.print(Text(_cell(line, console.width).rstrip()), soft_wrap=True)


def _fitted(widths: Sequence[int], room: int, shortest: int) -> list[int]:
    """Return the widths of columns that fit side by side: the widest are narrowed. Return [] if one would be narrower
    than `shortest`."""
    fitted = [*(min(_WIDEST, width) for width in widths[:-1]), widths[-1]]
    for _ in range(sum(fitted) + len(_GAP) * (len(fitted) - 1) - room):
        widest = max(fitted)
        if widest <= shortest:
            return []
        fitted[fitted.index(widest)] -= 1
    return fitted


def _cell(text: str, width: int) -> str:
    """Return a text as wide as its column, cut if it is longer."""
    return set_cell_size(text, width) if cell_len(text) <= width else f"{set_cell_size(text, width - 1)}\u2026"
