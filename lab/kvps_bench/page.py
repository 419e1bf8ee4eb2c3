"""Run all benches and write docs/performance.md, its pictures and performance.json. `make bench` runs this.

performance.json keeps earlier results: with --only the other sections stay as they are.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from kvps_bench import digits
from kvps_bench.charts import Bar, chart
from kvps_bench.result import Table, bars_table, rows_tables

BENCHES = (
    *("transport", "round", "units", "straggler", "scale", "readers"),
    *("workers", "shards", "wake", "links", "digits"),
)
_TITLES = {
    "transport": "Moving arrays",
    "round": "A round",
    "others": "A round of other systems",  # measured once: their programs are gone
    "units": "Rounds of units",
    "straggler": "Slow workers",
    "scale": "Many tensors, Adam, large models",
    "readers": "Many readers",
    "workers": "Many workers",
    "shards": "Many shards",
    "wake": "From a commit to the next pull",
    "links": "Hosts and their links",
    "digits": "Digits in every mode",
}
_HEAD = """# Performance

`make bench` writes this page. Machines are noisy, so the cases that are compared take turns within one run. What counts
is the ratio: the median over the turns, with the smallest and the largest. Times are medians with the 10th and 90th
percentile. The first turn of each case is a warm-up and is not counted, unless the section says otherwise. No GPU was
available, so figures with CuPy are missing.
"""


def main() -> None:
    options = _options()
    out: Path = options.out
    file = out / "performance.json"
    results: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    for bench in [name for name in options.only.split(",") if name]:
        command = ["kvps_bench", bench, "--json", *(["--quick"] if options.quick else [])]
        command += ["--turns", str(options.turns)] if options.turns else []
        print(bench, flush=True)
        measured = digits.measure(options.turns or (1 if options.quick else 7)) if bench == "digits" else _run(command)
        shown = "make bench" if bench == "digits" else " ".join(["python", "-m", *command])
        results[bench] = {"command": shown, **measured}
        file.write_text(json.dumps(results, indent=1) + "\n")  # at once, because the next bench may fail
    (out / "images").mkdir(exist_ok=True)
    for name, picture in pictures(results).items():
        (out / "images" / name).write_text(picture)
    (out / "performance.md").write_text(page(results))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(BENCHES), help="which to measure now; empty: only write the page")
    parser.add_argument("--quick", action="store_true", help="few and small turns")
    parser.add_argument("--turns", type=int, help="how many turns each case has (default: the benches' own)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[2] / "docs")
    return parser.parse_args()


def _run(command: list[str]) -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-m", *command], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: failed")
    return json.loads(done.stdout)  # type: ignore[no-any-return]


# -- the page -------------------------------------------------------------------------------------------------------


def page(results: dict[str, Any]) -> str:
    """Return the page, with a section for each bench that was measured."""
    return _HEAD + "".join(_section(results[name]) for name in _TITLES if name in results)


def _section(result: dict[str, Any]) -> str:
    m = result["machine"]
    where = f"{m['cores']} cores, {m['memory_gb']:g} GB, {m['server']}, Python {m['python']}, NumPy {m['numpy']}"
    begun = f"{m['date']}, {where}; load {m['load_1m']:g} at its end; {result['turns']} turns."
    parts = [f"## {_TITLES[result['bench']]}", f"`{result['command']}`, {begun}"]
    if picture := _PICTURES.get(result["bench"]):
        parts.append(f"![{_TITLES[result['bench']]}](images/{picture})")
    if result["bench"] == "digits":
        parts.append(_markdown(("", result["header"], result["cells"])))
    else:
        parts += [_markdown(table) for table in (*rows_tables(result), bars_table(result))]
    parts.append("\n".join(f"- {note}" for note in result["notes"]))
    return "\n" + "\n\n".join(parts) + "\n"


def _markdown(table: Table) -> str:
    title, header, cells = table
    lines = [f"| {' | '.join(row)} |" for row in [header, ["---"] * len(header), *cells]]
    return (f"{title}:\n\n" if title else "") + "\n".join(lines)


# -- pictures -------------------------------------------------------------------------------------------------------

_PICTURES = {"round": "rounds.svg", "straggler": "straggler.svg"}


def pictures(results: dict[str, Any]) -> dict[str, str]:
    """Return file name -> SVG, for the benches that were measured."""
    drawn = {}
    if "round" in results:
        drawn["rounds.svg"] = _rounds([*results["round"]["rows"], *results.get("others", {}).get("rows", [])])
    if "straggler" in results:
        drawn["straggler.svg"] = _stragglers(results["straggler"]["rows"])
    return drawn


def _rounds(rows: list[dict[str, Any]]) -> str:
    """Draw the largest model with the fewest workers."""
    mb, workers = max(row["mb"] for row in rows), min(row["workers"] for row in rows)
    shown = [row for row in rows if (row["mb"], row["workers"]) == (mb, workers) and "p50_ms" in row]
    title = f"A round of {workers} workers, {mb:g} MB"
    return chart(title, "ms", [_bar(f"{row['case']} ({row['transport']})", row) for row in shown])


def _stragglers(rows: list[dict[str, Any]]) -> str:
    labels = [f"{row['slow'].split(',')[0].removeprefix('one worker ')}: {row['case']}" for row in rows]
    bars = [_bar(label, row) for label, row in zip(labels, rows, strict=True)]
    return chart("Time until the digits reach their accuracy, with slow workers", "ms", bars)


def _bar(label: str, row: dict[str, Any]) -> Bar:
    kind = "limit" if row["case"].startswith("bare") else "ours" if label.startswith("kvps") else "other"
    if "slow" in row:
        kind = "limit" if row["case"] == "BSP" else "ours"
    return Bar(label, row["p50_ms"], row["p10_ms"], row["p90_ms"], kind)


if __name__ == "__main__":
    main()
