"""Results of scenarios: kept as JSON, shown as a table, written up as docs/reliability.md."""

from __future__ import annotations

import dataclasses
import json
import platform
from dataclasses import dataclass, field
from pathlib import Path

from chaos.verdict import Verdict

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "docs" / "reliability.json"
PAGE = ROOT / "docs" / "reliability.md"


@dataclass
class Result:
    """What came out of a scenario.

    faults    how many of each kind were injected, counted where they were; `needed` of them all together
    trials    what the bound is said of: 0 failures of so many
    times     seconds that faults of each kind took, one by one; `bars` what each may take
    rows      a table of its own: column -> entry, for each line
    figures   what else was measured
    skipped   why it was not run; empty if it was
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
    skipped: str = ""
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def injected(self) -> int:
        return sum(self.faults.values())

    def close(self) -> Result:
        """Judge the whole: the problems of its jobs, and that as many faults were injected as it says."""
        self.problems += self.verdict.problems
        if self.injected < self.needed:
            self.problems.append(f"only {self.injected} faults were injected, {self.needed} are needed")
        return self

    @property
    def bound(self) -> str:
        """What none of so many means: with 95 % confidence the rate is below 3 / n."""
        trials = self.trials or self.injected
        return f"< {300 / trials:.2g} %" if trials and not self.problems else ""


def save(results: dict[str, Result], path: Path = RESULTS) -> None:
    """Keep the results, so that a run can go on where it was."""
    out = {name: dataclasses.asdict(result) for name, result in results.items()}
    path.write_text(json.dumps(out, indent=1) + "\n")


def load(path: Path = RESULTS) -> dict[str, Result]:
    """What earlier runs have kept."""
    if not path.exists():
        return {}
    stored = json.loads(path.read_text())
    return {name: Result(**fields | {"verdict": Verdict(**fields["verdict"])}) for name, fields in stored.items()}


HEADINGS = ("scenario", "faults", "contributions", "lost", "twice", "not as promised", "bound at 95 %")


def rows(results: dict[str, Result]) -> list[tuple[str, ...]]:
    """The table: a row a scenario."""
    out = []
    for r in results.values():
        v, judged = r.verdict, r.verdict.contributions > 0
        counts = (f"{v.contributions:,}", f"{v.lost}", f"{v.twice}") if judged else ("", "", "")
        out.append((r.title, f"{r.injected:,}", *counts, f"{len(r.problems)}", r.bound))
    return out


def table(results: dict[str, Result]) -> str:
    """The table as plain text, which is Markdown as well."""
    lines = [HEADINGS, tuple("---" if i == 0 else "---:" for i in range(len(HEADINGS))), *rows(results)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def write_page(results: dict[str, Result], path: Path = PAGE) -> None:
    """docs/reliability.md."""
    total = sum(r.injected for r in results.values())
    contributions = sum(r.verdict.contributions for r in results.values())
    lost, twice = (sum(getattr(r.verdict, what) for r in results.values()) for what in ("lost", "twice"))
    parts = [
        "# Reliability, measured",
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
    if r.faults:
        lines += ["", *(f"- {what}: {count:,}" for what, count in r.faults.items())]
    if r.figures:
        lines += ["", "| figure | |", "| --- | ---: |"]
        lines += [f"| {what} | {value:,} |" if isinstance(value, int) else f"| {what} | {value} |"
                  for what, value in r.figures.items()]  # fmt: skip
    if r.problems:
        lines += ["", "Not as promised:", "", *(f"- {problem}" for problem in r.problems[:20])]
    return "\n".join(lines)


def _machine() -> str:
    return f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"


_INTRODUCTION = """\
Made by `make chaos` on {machine}; `make test` runs a short form of it. The code is in [tests/chaos](../tests/chaos).

{total} faults were injected, {contributions} contributions committed meanwhile: {lost} acknowledged ones lost, {twice}
committed twice. Every worker appends what was acknowledged to it to a file, and at the end these files are held against
the commit log; the log is replayed in one process and must make the same weights bit for bit; no term commits after
another has taken its shard; no key is left but those of living versions, and none at all of a removed job. Every fault
is counted where it is injected, and a scenario that injected fewer than it says has failed."""

_BOUND = """\
The bound says what 0 of n proves: with 95 % confidence the rate is below 3/n, and not that it is zero. A kill here is a
true SIGKILL of a process that was forked for it; SIGKILL leaves what the kernel holds, so a power cut is modelled by
cutting the append-only file. Where Redis itself loses its last writes, `lost` counts what is missing beyond those."""
