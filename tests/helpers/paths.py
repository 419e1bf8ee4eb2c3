"""Where things are in this checkout, and on this machine."""

import os
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
PACKAGES = (
    "kvps",
    "aggregator/kvps_aggregator",
    "workers/kvps_workers",
    "cli/kvps_cli",
    "monitor/kvps_monitor",
    "lab/kvps_bench",
    "lab/kvps_simulate",
)


def program_on_path(*names: str) -> str:
    """Return the first of these programs that the PATH has. Without one the test is skipped, or fails in CI."""
    for name in names:
        if program := shutil.which(name):
            return program
    reason = f"there is no {' or '.join(names)} here"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)
