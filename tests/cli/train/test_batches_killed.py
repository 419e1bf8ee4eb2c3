"""A DataLoader script under `kvps run`, one of whose copies is killed again and again: each sample of each epoch once.

Read from the log and from the weights, which count the samples.
"""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.harness import check_chain, log_entries
from helpers.waiting import awaited_job, eventually

import kvps
from kvps.config import division_of
from kvps.partitions import UnitBatches

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.usefixtures("forked")]  # whole commands, anew

SAMPLES, BATCH, EPOCHS, KILLS = 500, 10, 6, 10
SCRIPT = f"""
import time
from pathlib import Path

import torch

import kvps
import kvps.torch

torch.set_num_threads(1)

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return {SAMPLES}

    def __getitem__(self, number):
        time.sleep(0.001)
        return number

class Count(torch.nn.Module):
    "Its weights count how often it was trained on each sample of each epoch."
    def __init__(self):
        super().__init__()
        self.done = torch.nn.Parameter(torch.zeros({EPOCHS}, {SAMPLES}))

    def forward(self, epoch, numbers):
        return -self.done[epoch, numbers].sum()

model = Count()
with kvps.from_env() as me:
    job = me.create_job(
        kvps.torch.parameters(model), optimizer=kvps.SGD(lr=1.0), reduction="sum",
        samples={SAMPLES}, batch_size={BATCH}, epochs={EPOCHS}, units_per_round=6,
    )
    with kvps.torch.join(job, model, me.id) as worker:
        batches = worker.batches(Numbers(), num_workers=2)
        for numbers in batches:
            time.sleep(1 if me.rank != 1 and Path("killing").exists() else 0.01)  # the job must outlast all kills
            loss = model(batches.epoch, numbers)
            loss.backward()
            worker.step(loss)
"""


def test_each_sample_of_each_epoch_counts_once_though_a_copy_is_killed_ten_times(
    lasting: kvps.Store, tmp_path: Path, start: Any
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "killing").touch()
    running = start("run", "-w", "3", "--", sys.executable, "train.py")
    job, clock = awaited_job(lasting, "train"), 0

    def pushed() -> bool:
        """Whether the copy has pushed something since it was last killed."""
        member = job.state().members.get("w1")
        return member is not None and not member.evicted and member.clock > clock

    for _ in range(KILLS):
        assert eventually(pushed, 300)  # PyTorch takes its time to load on a machine with much to do
        member = job.state().members["w1"]
        clock = member.clock + member.pending
        os.kill(member.pid, signal.SIGKILL)
    (tmp_path / "killing").unlink()
    running.output()
    config = job.config
    plan = UnitBatches(SAMPLES, BATCH, division_of(SAMPLES, config), config.seed)
    used = Counter(c.unit for commit in job.log() for c in commit.plan.contributions)
    assert used == dict.fromkeys(range(config.units), 1)
    counts = np.zeros((EPOCHS, SAMPLES), int)
    for unit in used:
        counts[unit // config.units_per_epoch, plan.rows(unit)] += 1
    np.testing.assert_array_equal(counts, 1)
    np.testing.assert_array_equal(job.snapshot()[1]["done"], 1)
    assert Counter(fields["kind"] for _, fields in log_entries(job))["evict"] == KILLS
    check_chain(job)
