"""What is printed where, and how much: results on stdout, the rest on stderr, by --quiet and -v. Real runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from helpers.commands import TINY, kvps_run

pytestmark = pytest.mark.slow  # each starts whole commands

RESULT = re.compile(
    r"60 contributions in 20 versions, [\d.]+ s, \d+ contributions/s, test loss [\d.]+\ntest accuracy 0\.\d+\n"
)
LOGGED = re.compile(r"(?:\w+: )?\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (DEBUG|INFO|WARNING) kvps\.\w+: .*")


def test_quiet_prints_the_results_and_nothing_else(home: Path) -> None:
    done = kvps_run("up", "digits", *TINY, "--quiet")
    assert (done.returncode, done.stderr) == (0, "")
    assert RESULT.fullmatch(done.stdout)


def test_quiet_prints_errors(home: Path) -> None:
    done = kvps_run("worker", "--quiet", "--redis", "redis://127.0.0.1:1")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.startswith("kvps: error: no Redis server answers")


def test_usually_what_happens_is_told_on_stderr(home: Path) -> None:
    done = kvps_run("up", "digits", *TINY)
    assert RESULT.fullmatch(done.stdout), "and stdout has the results"
    assert "look inside: kvps cli" in done.stderr
    assert "version 20  clock w0=20 w1=20 w2=20  loss " in done.stderr.splitlines()[-1]
    assert not [line for line in done.stderr.splitlines() if LOGGED.fullmatch(line)]


def test_verbose_adds_the_log_of_every_process_with_times(home: Path) -> None:
    done = kvps_run("up", "digits", *TINY, "-v")
    assert RESULT.fullmatch(done.stdout)
    logged = [line for line in done.stderr.splitlines() if LOGGED.fullmatch(line)]
    assert any(line.startswith("aggregator: ") and "kvps.lease: job digits: holds shard 0" in line for line in logged)
    assert any(line.startswith("w2: ") and "kvps.worker: job digits: joined as w2" in line for line in logged)
    assert " DEBUG " not in "".join(logged)
    assert " DEBUG kvps.supervise: w0 (process " in kvps_run("up", "digits", *TINY, "-vv").stderr


def test_quiet_and_verbose_exclude_each_other(home: Path) -> None:
    done = kvps_run("worker", "-q", "-v")
    assert (done.returncode, done.stderr) == (2, "kvps: error: --quiet and --verbose exclude each other\n")
