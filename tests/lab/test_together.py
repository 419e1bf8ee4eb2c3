"""kvps_bench.together in a tiny form: what its link carries is judged, and no time."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.hosts import network

pytestmark = pytest.mark.slow  # it starts a whole command


def test_the_link_carries_a_version_once_for_a_host(home: Path) -> None:
    with network(2):
        pass  # skips the test where hosts may not be made
    command = [sys.executable, "-m", "kvps_bench.together", "--mb", "8", "--workers", "3", "--turns", "2"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    shared, each = (float(mb) for mb in re.findall(r"([0-9.]+) MB received", done.stdout))
    assert each == pytest.approx(24, rel=0.1)
    assert shared == pytest.approx(8, rel=0.1)
