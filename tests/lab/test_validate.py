"""kvps_bench.calibrate and kvps_bench.validate in a tiny form. No time is judged here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from kvps_simulate.settings import Constants

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.usefixtures("forked")]  # it starts whole commands


def test_constants_that_were_measured_serve_a_comparison_with_real_rounds(home: Path, tmp_path: Path) -> None:
    file = tmp_path / "constants.json"
    command = [sys.executable, "-m", "kvps_bench.calibrate", "--quick", "--rounds", "1", "-o", str(file)]
    subprocess.run(command, check=True)
    measured = Constants.load(file)
    assert measured.put_byte > 0
    assert measured.get_byte > 0
    assert set(measured.encode) == {"fp32", "int8"} < set(Constants.load().encode)
    command = [sys.executable, "-m", "kvps_bench.validate", "--quick", "--nodes", "1,2", "--workers", "1", "--mb", "1"]
    done = subprocess.run(
        [*command, "--rounds", "3", "--turns", "1", "--constants", str(file), "--json"],
        check=True,
        capture_output=True,
        text=True,
    )
    cases = json.loads(done.stdout)
    assert [case["nodes"] for case in cases] == [1, 2]
    for case in cases:
        assert case["real_ms"] > 0
        assert case["simulated_ms"] > 0
        assert abs(case["bytes_error"]) < 0.05
