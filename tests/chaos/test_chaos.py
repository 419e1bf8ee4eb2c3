"""The chaos suite in its short form: every family of faults, small, with a seed that is printed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from chaos import report
from chaos.__main__ import SHORT, run

EVERY_DAY = ("points",)
_APPLIES_EACH = """
import os
from chaos.mutants import MUTANTS
for mutant in MUTANTS.values():
    if not os.fork():
        mutant.apply()
        os._exit(0)
    assert os.wait()[1] == 0, mutant.says
"""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in EVERY_DAY else pytest.mark.slow) for name in SHORT]
)
def test_all_is_as_promised(name: str) -> None:
    seed = time.time_ns() % 1_000_000
    print(f"seed {seed}: python -m chaos --short --only {name} --seed {seed}")
    result = run(name, SHORT[name], seed)
    assert result.problems == []
    assert result.injected >= result.needed > 0


def test_mutants_fit_the_code_that_they_change() -> None:
    """One that does not fit ends its processes, which looks as if it was caught."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", _APPLIES_EACH], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_results_are_kept_and_written_up(tmp_path: Path) -> None:
    times = {"a worker": [0.1 * number for number in range(1, 101)]}
    results = {
        "times": report.Result("times", "timed", 1, {"a worker": 100}, times=times, bars={"a worker": 12.0}),
        "peers": report.Result("peers", "others", 1, {"a peer": 7}, rows=[{"peer": "a peer", "kills": 7}], ours=False),
    }
    report.save(results, tmp_path / "json")
    assert report.load(tmp_path / "json") == results
    report.write_page(results, tmp_path / "page")
    page = (tmp_path / "page").read_text()
    assert "| a worker | 100 | 5.000 | 9.900 | 10.000 | 12 |" in page
    assert "| a peer | 7 |" in page
    assert "injected 100 faults" in page, "faults of other systems are not counted"
