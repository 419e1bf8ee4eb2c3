"""Measure `kvps up digits` in every mode, with and without a straggler, in turns. Part of `make bench`."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import kvps
from kvps.server import private_server
from kvps_bench.result import machine

Case = tuple[int, str, str]
"""Staleness, straggler, gradient format."""
FORMATS = ("bf16", "int8")
CASES = [(s, slow, "fp32") for slow in ("", "w0=5x") for s in (0, 2, -1)] + [
    (0, "", gradient_format) for gradient_format in FORMATS
]
WORKERS = 3
_HEADER = [
    *("mode", "straggler", "gradient format", "test accuracy"),
    *("contributions/s", "versions/s", "training, s", "waiting"),
]


def measure(repeats: int) -> dict[str, Any]:
    """Run every case `repeats` times, in turns, on a new server; return the table and its notes."""
    results: dict[Case, list[dict[str, Any]]] = {case: [] for case in CASES}
    with tempfile.TemporaryDirectory(prefix="kvps-") as folder:
        os.environ["KVPS_RUNTIME_DIR"] = folder
        private_server.start()
        try:
            with kvps.connect() as store:
                where = machine(store.client)
                for _ in range(repeats):
                    for case in CASES:
                        results[case].append(_run(store, Path(folder) / "report.json", *case))
        finally:
            private_server.stop()
    return {
        "bench": "digits",
        "turns": repeats,
        "machine": where,
        "header": _HEADER,
        "cells": [_row(case, runs) for case, runs in results.items()],
        "notes": _notes(results),
    }


def _run(store: kvps.Store, report: Path, staleness: int, slow: str, gradient_format: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "kvps", "up", "digits", "--job", "figures", "-s", str(staleness)]
    command += ["-w", str(WORKERS), "--report", str(report), *(["--slow", slow] if slow else [])]
    command += ["--gradient-format", gradient_format]
    command += ["--weight-format", "bf16" if gradient_format == "bf16" else "fp32"]
    subprocess.run(command, check=True, capture_output=True)
    traces = store.job("figures").traces(last=1000)
    store.remove_job("figures")
    waiting = statistics.mean(trace.waiting for trace in traces.values())
    figures: dict[str, Any] = json.loads(report.read_text())
    return figures | {"waiting": waiting}


def _row(case: Case, runs: list[dict[str, Any]]) -> list[str]:
    staleness, slow, gradient_format = case
    return [
        kvps.staleness.mode_name(staleness),
        slow or "-",
        "bf16 both ways" if gradient_format == "bf16" else gradient_format,
        _spread([run["accuracy"] for run in runs], ".3f"),
        _spread([run["contributions_per_s"] for run in runs], ".0f"),
        _spread([run["version"] / run["seconds"] for run in runs], ".0f"),
        _spread([run["seconds"] for run in runs], ".2f"),
        _spread([run["waiting"] for run in runs], ".0%"),
    ]


def _spread(values: list[float], form: str) -> str:
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def _notes(results: dict[Case, list[dict[str, Any]]]) -> list[str]:
    bsp = [
        run
        for (staleness, _, gradient_format), runs in results.items()
        if (staleness, gradient_format) == (0, "fp32")
        for run in runs
    ]
    accuracy = {
        gradient_format: results[0, "", gradient_format][0]["accuracy"] for gradient_format in ("fp32", *FORMATS)
    }
    apart = ", ".join(
        f"{gradient_format} {accuracy[gradient_format] - accuracy['fp32']:+.4f}" for gradient_format in FORMATS
    )
    digests = {run["weights_sha256"] for run in bsp}
    same = "the same weights, bit for bit" if len(digests) == 1 else f"{len(digests)} different weights"
    contributions = sum(results[CASES[0]][0]["clock"].values())
    return [
        f"Bar 13: BSP with fp32 ends at an accuracy of {accuracy['fp32']:.4f}. The other formats differ from it by: "
        f"{apart} (wanted: within 0.01).",
        f"A contribution is one gradient of 32 digits; a run has {contributions:,}. A version takes as many as its "
        "mode allows, so versions/s shows how finely SSP and ASP commit, not how fast they are.",
        "*Waiting* is the share of the workers' time in which the bound held them back.",
        f"BSP runs with the same seed, with and without the straggler, ended with {same}, in {len(bsp)} runs.",
        "SSP does not help against a worker that is *always* slow: at best it runs at the straggler's pace. ASP does "
        "not hold the others back, but the run ends only when the straggler has done its own third of the data.",
        "The model has 20 KB, so this measures the protocol's round trips, not the moving of arrays. A server, an "
        f"aggregator and {WORKERS} workers share the cores.",
    ]
