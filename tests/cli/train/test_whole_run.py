"""One run from first to last: three copies under kills, a scheduler on rank 0, an evaluator that ends it."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.commands import kvps_run

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked")]  # each starts whole commands

SCRIPT = """
import os, signal

import kvps
from helpers.harness import gradient, model

with kvps.from_env() as worker:
    job = worker.create_job(model(), optimizer=kvps.SGD(lr=0.05, momentum=0.9), min_workers=3)

    @worker.evaluates(job)
    def evaluate(weights):
        version = job.evaluation().version if job.evaluation() else 0
        if version >= 40:
            job.stop("the loss grows no smaller")
        return {"loss": float(abs(weights["b"]).sum())}

    with job.join(worker.id) as session:
        while session.clock < 10_000:
            if session.rank == 0 and session.clock in (10, 20):  # a plateau, as its scheduler sees it
                job.set_lr(0.05 / session.clock)
            params = session.pull()
            if session.rank and session.clock % 20 == session.rank and session.sequence:
                os.kill(os.getpid(), signal.SIGKILL)
            session.push(gradient(params, session.rank, session.clock))
    print("ended at", session.round, session.stopping)
"""


def test_a_run_is_steered_evaluated_and_stopped_under_kills(
    lasting: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    run = kvps_run(
        "run", "-w", "3", "--eval-every", "5", "--log-keep", "0", "--record", "kept", "--", sys.executable, "train.py"
    )
    assert run.returncode == 0, run.stderr
    assert run.stderr.count("was killed (SIGKILL)") >= 4
    ends = re.findall(r"w\d: ended at (\d+) True", run.stdout)
    assert len(ends) == 3
    assert len(set(ends)) == 1, "all loops end with the same round"
    log = kvps_run("log", "train", "-n", "1000").stdout
    assert re.search(r"stop .*evaluator.*the loss grows no smaller", log)
    assert len(re.findall(r"set .*w0", log)) == 2
    assert "identical" in kvps_run("verify", "train", "--record", "kept").stdout
