"""The Python in README and docs is run as it stands there."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import kvps_aggregator
import numpy as np
import pytest
from commands import TINY, kvps_run

import kvps

HERE = Path(__file__).parent.parent


def python_in(page: str) -> list[str]:
    """The Python blocks of a page."""
    return re.findall(r"```python\n(.*?)```", (HERE / page).read_text(), re.DOTALL)


def test_the_readmes_five_lines(home: Path) -> None:
    assert kvps_run("server", "start").returncode == 0
    try:
        with kvps.connect() as store:
            start = {"x": np.zeros(3, np.float32)}
            job = store.create_job("mine", start, reduction="sum", optimizer=kvps.SGD(lr=1.0))
            thread = threading.Thread(target=kvps_aggregator.serve, args=(job,))
            thread.start()
            (code,) = python_in("README.md")
            exec(code, {"batches": range(4), "gradient": lambda params, batch: {"x": np.ones(3, np.float32)}})
            thread.join(30)
            np.testing.assert_array_equal(job.snapshot()[1]["x"], [-4, -4, -4])
    finally:
        assert kvps_run("server", "stop").returncode == 0


def test_the_task_of_the_tasks_page(home: Path, tmp_path: Path) -> None:
    (code,) = python_in("docs/tasks.md")
    (tmp_path / "mine.py").write_text(code)
    done = kvps_run("up", "mine:Line")
    assert done.returncode == 0, done.stderr
    assert "test loss 0.00" in done.stdout


def test_the_lag_of_the_modes_page(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert kvps_run("server", "start").returncode == 0
    try:
        assert kvps_run("up", "digits", "-s", "1", "--slow", "w0=5x", *TINY).returncode == 0
        (code,) = python_in("docs/modes.md")
        exec(code, {})
        assert capsys.readouterr().out == "largest lag in rounds: 1\n"
    finally:
        assert kvps_run("server", "stop").returncode == 0


def test_submit_from_python(home: Path, start: Any) -> None:
    assert kvps_run("server", "start").returncode == 0
    try:
        beside = [start("aggregator", "start"), start("worker", "--queue"), start("worker", "--queue")]
        done = subprocess.run(
            [sys.executable, "-P", str(HERE / "examples" / "submit_from_python.py")], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert float(done.stdout.split()[-1]) > 0.9
        for other in beside:
            assert other.end() == 128 + signal.SIGTERM
    finally:
        assert kvps_run("server", "stop").returncode == 0
