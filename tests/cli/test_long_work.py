"""Progress of long commands: on a terminal, in a pipe, as JSON, and not at all."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from helpers.terminals import on_a_terminal
from kvps_cli.long_work import Stage, duration

from kvps.errors import NoServer

pytestmark = pytest.mark.usefixtures("forked")

# A command whose work goes on until each way of showing it has been seen: a slow machine only makes it last longer.
WORK = """
import sys, threading
from kvps_cli import long_work
from kvps_cli.long_work import LongWork

seen = threading.Event()
shown = LongWork._show
long_work.PATIENCE_S = 0.2

def show(self, stage):
    shown(self, stage)
    times.append(stage.done)
    if len(times) == 3:
        seen.set()

times = []
LongWork._show = show
with LongWork(quiet="quiet" in sys.argv, as_json="json" in sys.argv) as work:
    with work.stage("sorting [red] figs", 8, "figs") as stage:
        stage.add(2)
        if "quiet" not in sys.argv:
            assert seen.wait(120)
print("42")
"""


def on_pipe(*arguments: str) -> tuple[str, list[str]]:
    """Return what the command prints on stdout, and its lines on stderr."""
    done = subprocess.run([sys.executable, "-c", WORK, *arguments], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr.splitlines()


def test_a_pipe_gets_plain_lines() -> None:
    stdout, lines = on_pipe()
    assert stdout == "42\n"
    assert len(lines) >= 3
    for line in lines:
        assert re.fullmatch(r"sorting \[red\] figs: 2 of 8 figs, \d+ s left", line), line


@pytest.mark.slow
def test_json_is_a_line_each_and_the_result_stays_alone() -> None:
    stdout, lines = on_pipe("json")
    assert stdout == "42\n"
    for facts in map(json.loads, lines):
        assert (facts["progress"], facts["done"], facts["total"], facts["unit"]) == ("sorting [red] figs", 2, 8, "figs")
        assert facts["left_s"] == pytest.approx(3 * facts["elapsed_s"], abs=0.2)


@pytest.mark.slow
def test_a_terminal_gets_a_bar() -> None:
    with on_a_terminal([sys.executable, "-c", WORK], columns=100) as terminal:
        assert terminal.end() == 0
        for words in ("sorting [red] figs", "━", "2 of 8 figs"):
            assert words in terminal.output
        assert re.search(r"\d+ s left", terminal.output)
        assert terminal.output.rstrip().endswith("42"), "the bar goes, the result stays"
    with on_a_terminal([sys.executable, "-c", WORK, "quiet"]) as terminal:
        assert terminal.end() == 0
        assert terminal.output.strip() == "42"


def test_what_is_not_known_is_not_said() -> None:
    stage = Stage("reading")
    assert re.fullmatch(r"reading, \d+ s so far", stage.line())
    assert stage.to_dict() | {"elapsed_s": 0} == {
        "progress": "reading",
        "done": 0,
        "total": None,
        "unit": None,
        "elapsed_s": 0,
        "left_s": None,
    }
    stage = Stage("writing", 4_000_000, "bytes")
    assert stage.left_s is None
    stage.add(1_000_000)
    assert stage.counted == "1.0 of 4.0 MB"


def test_a_measure_that_fails_is_no_error_of_the_command() -> None:
    def measure() -> int:
        raise NoServer("gone")

    stage = Stage("storing", 5, "chunks", measure)
    stage.update()
    assert (stage.done, stage.measure) == (0, None)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59.4, "59 s"), (59.6, "1 min 0 s"), (3599, "59 min 59 s"), (7500, "2 h 5 min")]
)
def test_times_are_read_at_a_glance(seconds: float, text: str) -> None:
    assert duration(seconds) == text
