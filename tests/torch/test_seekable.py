"""Iterable data sets that can seek: each sample of each epoch counts once, whoever reads it."""

from __future__ import annotations

import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.commands import Started
from helpers.counting import BATCH, SAMPLES, Count, Numbers, Sharded, count, counting, once
from helpers.digits_job import run_workers
from helpers.pages import python_in
from helpers.torch_process import TorchPopen
from helpers.waiting import eventually

import kvps
import kvps.torch
from kvps.store import Store
from kvps.torch.seekable import Range, Shards

HOLDS_A_BATCH = """
import sys, time
from pathlib import Path
import kvps, kvps.torch
from helpers.counting import Count, Numbers, Sharded

model = Count()
worker = kvps.torch.join(kvps.connect(sys.argv[1]).job("job"), model, "w0")
for number, numbers in enumerate(worker.batches(Sharded(Numbers()), num_workers=1)):
    if number:
        Path(sys.argv[2]).touch()
        time.sleep(600)
    model(numbers).backward()
    worker.step()
"""


def test_an_epoch_has_the_shards_in_an_order_of_its_own_and_reads_on_where_it_can(store: Store) -> None:
    job, data, seen = counting(store), Sharded(Numbers()), list[Any]()
    run_workers(job, partial(count, job, "w0", seen, dataset=data))
    once(job)
    assert [len(numbers) for numbers in seen] == 2 * [8, 8, 8, 8, 8, 5]
    shards = [range(20), range(0), range(20, 27), range(27, 45)]
    for epoch, batches in enumerate((seen[:6], seen[6:])):
        order = np.random.default_rng((0, epoch)).permutation(4)
        assert torch.cat(batches).tolist() == [number for shard in order for number in shards[shard]]
    assert sorted(data.sought) == sorted(2 * [(0, 0), (2, 0), (3, 0)])


@pytest.mark.slow
def test_three_workers_of_which_one_is_killed(store: Store, tmp_path: Path) -> None:
    """It is killed with a batch, and with more that its loader process has read ahead."""
    job, holds = counting(store, workers=1, worker_timeout_ms=1000), tmp_path / "holds"
    script = tmp_path / "holds_a_batch.py"
    script.write_text(HOLDS_A_BATCH)
    killed = Started([sys.executable, str(script), store.url, str(holds)], os.environ, TorchPopen)
    others = [partial(count, job, f"w{n}", [], dataset=Sharded(Numbers())) for n in (1, 2)]

    def kill() -> None:
        assert eventually(holds.exists, 120)
        assert killed.end(signal.SIGKILL) == -signal.SIGKILL

    def join_later(worker: Any) -> None:
        assert eventually(holds.exists, 120)
        worker()

    run_workers(job, kill, *(partial(join_later, each) for each in others))
    once(job)
    assert {c.worker for commit in job.log() for c in commit.plan.contributions} == {"w0", "w1", "w2"}


def test_drop_last_leaves_out_the_end_of_an_epoch() -> None:
    """The places behind it are never asked for; which samples they have differs from epoch to epoch."""
    shards = Shards(Sharded(Numbers()), 0)
    ends = [tuple(shards.ranges(epoch, 40, BATCH)) for epoch in range(20)]
    assert {sum(each.length for each in end) for end in ends} == {SAMPLES - 40}
    assert len({*ends}) > 1


@pytest.mark.parametrize("lengths", [[3, -1], [1.5], "45", 45, None])
def test_lengths_that_are_none_are_refused(store: Store, lengths: Any) -> None:
    with kvps.torch.join(counting(store), Count(), "w0") as worker:
        with pytest.raises(kvps.InvalidSetting, match="samples_per_shard must be a list of whole numbers") as raised:
            worker.batches(Sharded(Numbers(), lengths))
        assert "\n" not in str(raised.value)


def test_a_shard_that_ends_early_is_one_line() -> None:
    class Short:
        samples_per_shard = (9, 9)

        def iterate(self, shard: int, offset: int) -> Any:
            return iter(range(offset, 7))

    shards = Shards(Short(), 0)
    assert shards.__getitems__([Range(1, 0, 4)]) == [0, 1, 2, 3]
    with pytest.raises(kvps.InvalidSetting, match="shard 1 ended after 7 samples, and samples_per_shard says 9: count"):
        shards.__getitems__([Range(1, 4, 5)])


def test_the_data_set_of_the_page(tmp_path: Path) -> None:
    (code,) = (block for block in python_in("docs/torch.md") if "samples_per_shard" in block)
    exec(code, names := dict[str, Any]())
    for number, lines in enumerate(("a\nb\nc\n", "d\ne\n")):
        (tmp_path / str(number)).write_text(lines)
    dataset = names["Lines"]([tmp_path / "0", tmp_path / "1"])
    assert [*dataset] == ["a\n", "b\n", "c\n", "d\n", "e\n"]
    assert Shards(dataset, 0).__getitems__([Range(0, 1, 2), Range(1, 0, 1)]) == ["b\n", "c\n", "d\n"]
