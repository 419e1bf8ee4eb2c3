"""Results of scenarios: kept as JSON, shown as a table, written up as docs/reliability.md."""

from __future__ import annotations

import dataclasses
import json
import math
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from helpers.paths import ROOT

from chaos.verdict import Verdict

RESULTS = ROOT / "docs" / "reliability.json"
PAGE = ROOT / "docs" / "reliability.md"


@dataclass
class Result:
    """The result of a scenario.

    faults    kind -> number injected, counted at the injection; `needed` is the least number of all together
    trials    the number of trials that the bound is stated for; 0 stands for the number of faults
    times     kind of fault -> seconds that each fault took; `bars` kind -> the most that one may take
    rows      the scenario's own table: column -> entry, for each line
    figures   other measurements
    note      what a reader of the figures has to know
    ours      whether the faults hit kvps, and not another system
    problems  what was not as promised; empty if all was
    """

    name: str
    title: str
    seed: int
    faults: dict[str, int] = field(default_factory=dict)
    needed: int = 0
    verdict: Verdict = field(default_factory=Verdict)
    trials: int = 0
    times: dict[str, list[float]] = field(default_factory=dict)
    bars: dict[str, float] = field(default_factory=dict)
    rows: list[dict[str, float | int | str]] = field(default_factory=list)
    figures: dict[str, float | int | str] = field(default_factory=dict)
    note: str = ""
    ours: bool = True
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def injected(self) -> int:
        return sum(self.faults.values())

    def close(self) -> Result:
        """Judge the result: add its jobs' problems, and one if fewer faults were injected than needed."""
        self.problems += self.verdict.problems
        if self.injected < self.needed:
            self.problems.append(f"only {self.injected} faults were injected, {self.needed} are needed")
        return self

    @property
    def bound(self) -> str:
        """The bound that 0 failures in n trials show: with 95 % confidence the rate is below 3 / n."""
        trials = self.trials or self.injected
        return f"< {300 / trials:.2g} %" if trials and self.ours and not self.problems else ""


def save(results: dict[str, Result], path: Path = RESULTS) -> None:
    """Keep the results, so that a later run can continue."""
    out = {name: dataclasses.asdict(result) for name, result in results.items()}
    path.write_text(json.dumps(out, indent=1) + "\n")


def load(path: Path = RESULTS) -> dict[str, Result]:
    """Return the results that earlier runs kept."""
    if not path.exists():
        return {}
    stored = json.loads(path.read_text())
    return {name: Result(**fields | {"verdict": Verdict(**fields["verdict"])}) for name, fields in stored.items()}


HEADINGS = ("scenario", "faults", "contributions", "lost", "twice", "not as promised", "bound at 95 %")


def rows(results: dict[str, Result]) -> list[tuple[str, ...]]:
    """Return the table's rows, one for each scenario."""
    out = []
    for r in results.values():
        v, judged = r.verdict, r.verdict.contributions > 0
        counts = (f"{v.contributions:,}", f"{v.lost}", f"{v.twice}") if judged else ("", "", "")
        out.append((r.title, f"{r.injected:,}", *counts, f"{len(r.problems)}" if r.ours else "see below", r.bound))
    return out


def table(results: dict[str, Result]) -> str:
    """Return the table as plain text, which is Markdown as well."""
    return markdown(HEADINGS, rows(results))


def markdown(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table whose columns, except the first, are numbers."""
    rule = ["---"] + ["---:"] * (len(headings) - 1)
    return "\n".join("| " + " | ".join(line) + " |" for line in (headings, rule, *lines))


def percentile(seconds: list[float], share: float) -> float:
    """Return the smallest measured value that at least `share` of the values do not exceed."""
    return sorted(seconds)[math.ceil(share * len(seconds)) - 1]


def timed(result: Result) -> str:
    """Return a table of how long faults took."""
    lines = []
    for what, seconds in result.times.items():
        bar = f"{result.bars[what]:g}" if what in result.bars else ""
        spread = (f"{value:.3f}" for value in (percentile(seconds, 0.5), percentile(seconds, 0.99), max(seconds)))
        lines.append((what, f"{len(seconds)}", *spread, bar))
    return markdown(("seconds to the next commit", "faults", "p50", "p99", "max", "at most"), lines)


def write_page(results: dict[str, Result], path: Path = PAGE) -> None:
    """Write docs/reliability.md."""
    total = sum(r.injected for r in results.values() if r.ours)
    contributions = sum(r.verdict.contributions for r in results.values())
    lost, twice = (sum(getattr(r.verdict, what) for r in results.values()) for what in ("lost", "twice"))
    parts = [
        "# Fault-injection results",
        _INTRODUCTION.format(
            total=f"{total:,}", contributions=f"{contributions:,}", lost=lost, twice=twice, machine=_machine()
        ),
        table(results),
        _BOUND,
    ]
    for r in results.values():
        parts += [f"## {r.title}", _section(r)]
    path.write_text("\n\n".join(parts) + "\n")


def _section(r: Result) -> str:
    lines = [f"`python -m chaos --only {r.name} --seed {r.seed}`, {r.seconds:,.0f} s."]
    if r.faults and not r.times and not r.rows:  # times and rows count the faults too
        lines += ["", *(f"- {what}: {count:,}" for what, count in r.faults.items())]
    if r.times:
        lines += ["", timed(r)]
    if r.rows:
        headings = list(dict.fromkeys(heading for row in r.rows for heading in row))
        lines += ["", markdown(headings, [[_text(row.get(what, "")) for what in headings] for row in r.rows])]
    if r.figures:
        lines += ["", markdown(("figure", ""), [(what, _text(value)) for what, value in r.figures.items()])]
    if r.note:
        lines += ["", r.note]
    if r.problems:
        lines += ["", "Not as promised:", "", *(f"- {problem}" for problem in r.problems[:20])]
    return "\n".join(lines)


def _text(value: float | int | str) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value}"


def _machine() -> str:
    return f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"


_INTRODUCTION = """\
`make chaos` writes this page, on {machine}. `make test` runs a short form of it. The code is in
[tests/chaos](../tests/chaos).

The runs injected {total} faults and committed {contributions} contributions. {lost} acknowledged contributions were
lost, and {twice} were committed twice. Every worker writes each acknowledgement to a file. At the end these files are
compared with the commit log. The log is replayed in one process and must give the same weights bit for bit. No term may
commit after another has taken its shard. Only keys and segments of living versions may remain, and none of a removed
job. Faults are counted where they are injected. A scenario that injected fewer than it promises fails."""

_BOUND = """\
0 failures in n trials do not prove a rate of 0. They show, with 95 % confidence, that it is below 3/n.
A kill is a real SIGKILL of a forked process. SIGKILL leaves what the kernel holds, so a power cut is modelled by
cutting the append-only file. If Redis itself loses its last writes, `lost` counts only what is missing in addition."""
