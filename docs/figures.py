"""Measures the digits in every mode, in turns, and writes docs/performance.md. Run by `make figures`."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import kvps
from kvps import embedded

REPEATS = 7
CASES = [(s, slow) for slow in ("", "w0=5x") for s in (0, 2, -1)]
PAGE = """# Figures

Written by `make figures`, which runs `kvps up digits` with 3 workers in every mode, {repeats} times, in turns.
One machine: {machine}; one thread a process. Machines are noisy: compare within the table, not with
other pages. Median (least to most).

| mode | straggler | test accuracy | contributions/s | versions/s | training, s | waiting |
| --- | --- | --- | --- | --- | --- | --- |
{rows}

- A contribution is one gradient of 32 digits: {contributions} of them are a run. A version takes what its mode lets
  it take, so versions/s tell how finely SSP and ASP commit, not how fast they are.
- *Waiting* is the share of the workers' time in which the bound held them back.
- BSP runs with the same seed, with the straggler and without, ended with {same} in {bsp} runs.
- SSP does not help against a worker that is *always* slow: its ideal there is the straggler's own pace. ASP lets the
  others go, but the run ends with the straggler, which has its own third of the data to do.
- The model is 20 KB: this measures round trips of the protocol on 2 cores that a server, an aggregator and three
  workers share, not the moving of arrays.

No GPU was there when this was measured; figures with CuPy are owed.
"""


def main() -> None:
    results: dict[tuple[int, str], list[dict[str, Any]]] = {case: [] for case in CASES}
    with tempfile.TemporaryDirectory(prefix="kvps-") as folder:
        os.environ["KVPS_RUNTIME_DIR"] = folder
        embedded.start()
        try:
            with kvps.connect() as store:
                server = store.client.call("INFO", "server")
                for _ in range(REPEATS):
                    for case in CASES:
                        results[case].append(_run(store, Path(folder) / "report.json", *case))
        finally:
            embedded.stop()
    digests = {run["weights_sha256"] for (s, _), runs in results.items() if s == 0 for run in runs}
    version = server["redis_version"] if isinstance(server, dict) else "?"
    machine = f"{os.cpu_count()} cores, Redis {version}, Python {platform.python_version()}"
    first = results[CASES[0]][0]
    page = PAGE.format(
        repeats=REPEATS,
        machine=machine,
        rows="\n".join(_row(case, runs) for case, runs in results.items()),
        contributions=f"{sum(first['clock'].values()):,}",
        same="one and the same weights, bit for bit," if len(digests) == 1 else f"{len(digests)} different weights",
        bsp=2 * REPEATS,
    )
    (Path(__file__).parent / "performance.md").write_text(page)
    print(page)


def _run(store: kvps.Store, report: Path, staleness: int, slow: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "kvps", "up", "digits", "--job", "figures", "-s", str(staleness)]
    command += ["--report", str(report), *(["--slow", slow] if slow else [])]
    subprocess.run(command, check=True, capture_output=True)
    traces = store.job("figures").traces(last=1000)
    store.remove_job("figures")
    waiting = statistics.mean(trace.waiting for trace in traces.values())
    return json.loads(report.read_text()) | {"waiting": waiting}


def _row(case: tuple[int, str], runs: list[dict[str, Any]]) -> str:
    staleness, slow = case
    columns = [
        _spread([run["accuracy"] for run in runs], ".3f"),
        _spread([sum(run["clock"].values()) / run["wall_s"] for run in runs], ".0f"),
        _spread([run["steps_per_s"] for run in runs], ".0f"),
        _spread([run["wall_s"] for run in runs], ".2f"),
        _spread([run["waiting"] for run in runs], ".0%"),
    ]
    return f"| {kvps.clocks.mode_name(staleness)} | {slow or '-'} | {' | '.join(columns)} |"


def _spread(values: list[float], form: str) -> str:
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


if __name__ == "__main__":
    main()
