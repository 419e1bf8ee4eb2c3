"""kvps_simulate.validate in a tiny form. No time is judged here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked")]  # it starts whole commands


def test_real_rounds_beside_simulated_ones(home: Path) -> None:
    command = [sys.executable, "-m", "kvps_simulate.validate", "--nodes", "1,2", "--workers", "1", "--mb", "1"]
    done = subprocess.run([*command, "--rounds", "3", "--turns", "1"], check=True, capture_output=True, text=True)
    cases = [json.loads(line) for line in done.stdout.splitlines()]
    assert [case["nodes"] for case in cases] == [1, 2]
    for case in cases:
        assert case["real_ms"] > 0
        assert case["simulated_ms"] > 0
