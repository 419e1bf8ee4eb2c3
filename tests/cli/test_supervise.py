"""What `kvps up` says of processes that die: which one, what happened, what was done. Real kills."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.control_groups import control_group
from helpers.waiting import eventually

import kvps

pytestmark = pytest.mark.slow  # each starts whole commands


def test_each_kill_and_the_failover_is_one_line_with_its_reason(lasting: kvps.Store, start: Any) -> None:
    patient = ["--worker-timeout", "60", "--lease", "60"]  # what is quick is quick because the death is known
    running = start("up", "digits", "--workers", "2", "--aggregators", "2", "--epochs", "5000", *patient)
    running.until("version")
    job = lasting.job("digits")
    assert eventually(lambda: job.state().version > 10)
    worker = job.state().members["w1"].pid
    os.kill(worker, signal.SIGKILL)
    said = running.until("w1 (process").splitlines()[-1]
    assert re.fullmatch(rf"w1 \(process {worker}\) was killed \(SIGKILL\): evicted; started again as process \d+", said)
    holder = int(job.access.reader.holders()[0].split(":")[1])
    os.kill(holder, signal.SIGKILL)
    lines = running.until("took over").splitlines()
    (killed,) = [line for line in lines if f"(process {holder}) was killed" in line and "took over" not in line]
    ended = rf"(aggregator1?) \(process {holder}\) was killed \(SIGKILL\): its lease of shard 0 ended; "
    assert re.fullmatch(ended + r"started again as process \d+", killed)
    new = int(job.access.reader.holders()[0].split(":")[1])
    took = rf"shard 0: aggregator1? \(process {new}\) took over from aggregator1? \(process {holder}\), which was "
    assert re.fullmatch(took + r"killed \(SIGKILL\)", lines[-1])
    assert running.end() == 128 + signal.SIGTERM


def test_an_eviction_and_a_failover_without_a_death_say_why(lasting: kvps.Store, start: Any) -> None:
    """A worker and an aggregator that are stopped, as a paused machine's would be: only their silence is known."""
    short = ["--worker-timeout", "3", "--lease", "3"]
    running = start("up", "digits", "--workers", "2", "--aggregators", "2", "--epochs", "5000", *short)
    running.until("version")
    job = lasting.job("digits")
    assert eventually(lambda: job.state().version > 10)
    worker, holder = job.state().members["w1"].pid, int(job.access.reader.holders()[0].split(":")[1])
    os.kill(worker, signal.SIGSTOP)
    try:
        running.until("job digits: worker w1 gave no sign of life for ")
        os.kill(holder, signal.SIGSTOP)
        said = running.until("took over").splitlines()[-1]
        took = r"shard 0: aggregator1? \(process \d+\) took over from aggregator1? "
        assert re.fullmatch(took + rf"\(process {holder}\), whose lease ran out", said)
    finally:
        for stopped in (worker, holder):
            os.kill(stopped, signal.SIGCONT)
    assert running.end() == 128 + signal.SIGTERM


def test_who_is_killed_because_memory_ran_out_is_told_so(home: Path) -> None:
    """Copies that need more than their container has. Before, the last line spoke of signal 9 alone."""
    with control_group(600_000_000) as enters:
        copy = ["--", "sh", "-c", f"exec {sys.executable} -S -c 'bytearray(2 << 30)'"]
        done = subprocess.run(
            [*enters, sys.executable, "-m", "kvps", "run", "-w", "1", *copy], capture_output=True, text=True
        )
    killed = r"SIGKILL, by the kernel: the 600.0 MB of memory of this container ran out"
    assert re.search(rf"^w0 \(process \d+\) was killed \({killed}\): started again as process", done.stderr, re.M)
    last = rf"kvps: error: the run ends: w0 was killed 5 times in a row by signal 9 \({killed}\) before anything .*"
    assert re.fullmatch(last, done.stderr.splitlines()[-1])
    assert done.returncode == 1


def test_a_server_that_is_killed_because_memory_ran_out_says_so(home: Path) -> None:
    code = (
        "import kvps\nwith kvps.connect() as store:\n for i in range(999): store.client.call('SET', i, 'x' * (9 << 20))"
    )
    with control_group(300_000_000) as enters:
        done = subprocess.run([*enters, sys.executable, "-c", code], capture_output=True, text=True)
    said = "by a signal (the 300.0 MB of memory of this container ran out since it was started), and its jobs with it"
    assert said in done.stderr
