"""A copy under `kvps run` that is killed comes back and does its own next batch, by the loops of the documentation."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path
from textwrap import indent
from typing import Any

import numpy as np
import pytest
from helpers.harness import check_chain
from helpers.pages import python_in
from helpers.waiting import awaited_job, eventually

import kvps

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked")]  # each starts whole commands

BATCHES = 100
SCRIPT = f"""
import time
from pathlib import Path

import numpy as np

import kvps

def gradient(params, batch):
    time.sleep(0.01)
    done = np.zeros(({BATCHES}, 2), np.float32)
    done[batch, me.rank] = -1  # the weights count how often each copy has done each batch
    return {{"done": done}}

batches = range({BATCHES})
with kvps.from_env() as me:
    start = {{"done": np.zeros(({BATCHES}, 2), np.float32)}}
    job = me.create_job(start, reduction="sum", optimizer=kvps.SGD(lr=1.0))
    while me.rank == 1 and Path("away").exists():
        time.sleep(0.01)
"""


def loop_of(page: str) -> str:
    """Return the documented loop of a page, from where it joins, as lines of the script."""
    if page == "README.md":
        code = python_in(page)[0]
        loop = code[code.index("with job.join(") :].replace('"w0"', "me.id")
    else:
        (code,) = (block for block in python_in(page) if "batches[session.clock]" in block)
        loop = "with job.join(me.id) as session:\n" + indent(code, "    ")
    return indent(loop, "    ")


@pytest.mark.parametrize(
    ("page", "staleness", "until"),
    [("docs/run.md", 0, BATCHES), ("README.md", 1, 60)],
    ids=["BSP, after the others have finished", "SSP"],
)
def test_each_batch_of_each_copy_is_done_once(
    lasting: kvps.Store, tmp_path: Path, start: Any, page: str, staleness: int, until: int
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT + loop_of(page))
    running = start("run", "-w", "2", "-s", str(staleness), "--", sys.executable, "train.py")
    job = awaited_job(lasting, "train")
    for version in (10, 30):  # the second time it stays away
        assert eventually(
            lambda version=version: job.state().version > version and not job.state().members["w1"].evicted
        )
        if version == 30:
            (tmp_path / "away").touch()
        os.kill(job.state().members["w1"].pid, signal.SIGKILL)
        assert eventually(lambda: job.state().members["w1"].evicted)
    before = job.state().members["w1"]
    assert eventually(lambda: job.state().clock["w0"] >= until)
    (tmp_path / "away").unlink()
    lines = running.until("200 contributions in ")
    assert running.wait() == 0
    first, last = map(int, re.findall(r"^w1: w1 is back: rounds (\d+) to (\d+) were done without it$", lines, re.M)[-1])
    assert first == before.clock + before.skip + before.pending
    assert last >= until - 1 - staleness - 1
    np.testing.assert_array_equal(job.snapshot()[1]["done"], 1)
    counted = [contribution.worker for commit in job.log() for contribution in commit.plan.contributions]
    assert (counted.count("w0"), counted.count("w1")) == (BATCHES, BATCHES)
    check_chain(job)
