"""What `kvps up` says of processes that die: which one, what happened, what was done. Real kills."""

from __future__ import annotations

import os
import re
import signal
from typing import Any

from helpers.waiting import eventually

import kvps


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
    holder = int(job.holders()[0].split(":")[1])
    os.kill(holder, signal.SIGKILL)
    lines = running.until("took over").splitlines()
    (killed,) = [line for line in lines if f"(process {holder}) was killed" in line and "took over" not in line]
    ended = rf"(aggregator1?) \(process {holder}\) was killed \(SIGKILL\): its lease of shard 0 ended; "
    assert re.fullmatch(ended + r"started again as process \d+", killed)
    new = int(job.holders()[0].split(":")[1])
    took = rf"shard 0: aggregator1? \(process {new}\) took over from aggregator1? \(process {holder}\), which was "
    assert re.fullmatch(took + r"killed \(SIGKILL\)", lines[-1])
    assert running.end() == 128 + signal.SIGTERM
