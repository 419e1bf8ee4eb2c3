"""The result of a bench: rows of cases, the bars that they must meet, and the machine; as JSON, or as tables."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvps.connection.client import Client
from kvps_bench.turns import Ratio, Times

Figures = Mapping[str, float | int | str]


@dataclass(frozen=True)
class Row:
    """One case under one setting. If `times` is None, the case was not measured, and `why` is the reason."""

    case: str
    transport: str
    settings: Figures
    times: Times | None = None
    more: Figures = field(default_factory=dict)
    why: str = ""

    def to_dict(self) -> dict[str, Any]:
        measured: dict[str, Any] = self.times.to_dict() if self.times else {"not_measured": self.why}
        return {"case": self.case, "transport": self.transport, **self.settings, **measured, **self.more}


@dataclass(frozen=True)
class Bar:
    """A limit that a ratio must meet; without a limit the ratio is only stated. `number` is from the list of bars."""

    number: int
    what: str
    at_most: bool
    limit: float | None
    ratio: Ratio | None
    why: str = ""

    @property
    def holds(self) -> bool | None:
        """Whether the ratio meets the limit; None if it was not measured, or is only stated."""
        if self.ratio is None or self.limit is None:
            return None
        return self.ratio.median <= self.limit if self.at_most else self.ratio.median >= self.limit

    def to_dict(self) -> dict[str, Any]:
        wanted = "stated" if self.limit is None else f"{'<=' if self.at_most else '>='} {self.limit:g}"
        measured: dict[str, Any] = self.ratio.to_dict() if self.ratio else {"not_measured": self.why}
        return {"bar": self.number, "what": self.what, "wanted": wanted, **measured, "holds": self.holds}


@dataclass(frozen=True)
class Result:
    """All that one bench measured."""

    bench: str
    turns: int
    rows: Sequence[Row]
    bars: Sequence[Bar]
    machine: Figures
    notes: Sequence[str] = ()

    def to_dict(self) -> dict[str, Any]:
        return {
            "bench": self.bench,
            "turns": self.turns,
            "machine": self.machine,
            "rows": [row.to_dict() for row in self.rows],
            "bars": [bar.to_dict() for bar in self.bars],
            "notes": list(self.notes),
        }


def machine(client: Client) -> Figures:
    """Return where and when the bench ran."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cores": os.cpu_count() or 0,
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "server": client.server_name(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "load_1m": round(os.getloadavg()[0], 2),
    }


# -- as tables ------------------------------------------------------------------------------------------------------

Table = tuple[list[str], list[list[str]]]
"""The header and the cells."""
_TIMES = ("n", "p10_ms", "p50_ms", "p90_ms", "p99_ms", "not_measured")
_MEDIAN = "ms, median (p10 to p90)"


def rows_tables(result: Mapping[str, Any]) -> list[Table]:
    """Return the rows of `Result.to_dict`, one table for each part of the bench."""
    parts = dict.fromkeys(row.get("part", "") for row in result["rows"])
    return [_table([row for row in result["rows"] if row.get("part", "") == part]) for part in parts]


def bars_table(result: Mapping[str, Any]) -> Table:
    """Return the bars of `Result.to_dict` as a table."""
    return ["bar", "what", "wanted", "ratio (turn by turn)", "holds"], [_bar(bar) for bar in result["bars"]]


def _table(rows: list[dict[str, Any]]) -> Table:
    names = list(dict.fromkeys(name for row in rows for name in row if name not in _TIMES))
    header = [names[0], _MEDIAN, *(name.replace("_per_s", "/s").replace("_", " ") for name in names[1:])]
    return header, [[_cell(row, names[0]), _times(row), *(_cell(row, name) for name in names[1:])] for row in rows]


def _times(row: dict[str, Any]) -> str:
    if "not_measured" in row:
        return str(row["not_measured"])
    return f"{_short(row['p50_ms'])} ({_short(row['p10_ms'])} to {_short(row['p90_ms'])})"


def _bar(bar: dict[str, Any]) -> list[str]:
    if "ratio" not in bar:
        return [str(bar["bar"]), bar["what"], bar["wanted"], bar["not_measured"], "-"]
    holds = {True: "yes", False: "NO", None: "-"}[bar["holds"]]
    ratio = f"{bar['ratio']:.2f} ({bar['least']:.2f} to {bar['greatest']:.2f})"
    return [str(bar["bar"]), bar["what"], bar["wanted"], ratio, holds]


def _cell(row: Mapping[str, Any], name: str) -> str:
    value = row.get(name, "-")
    return _short(value) if isinstance(value, float) else str(value)


def _short(value: float) -> str:
    """Return the value to three significant digits."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
