"""In rounds of units the weights are the same bits, whatever else the job does and however many workers there were."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.digits_job import digits_job, proved, run_workers, training

import kvps
from kvps.optim import parse, schedules
from kvps.store import Store

UNITS = 15  # batches of 96 in one epoch of 1,438 samples
EACH = {
    "clipped and weighted": {"optimizer": kvps.SGD(lr=0.3, clip_norm=0.5), "reduction": "weighted"},
    "median": {"reduction": "median", "shards": 3},
    "trimmed": {"reduction": "trimmed:0.2", "optimizer": kvps.SGD(lr=0.3, momentum=0.9)},
    "a schedule": {"optimizer": kvps.Adam(lr=schedules.CosineAnnealingLR(0.02, over=4)), "shards": 3},
    "helper processes": {"procs": 2},
    "short weights": {"weight_format": "bf16"},
    "differences": {"weight_format": "int8"},
    "outliers": {"reject_norm": 1.5},
    "shared memory": {"transport": "shm", "optimizer": parse("sgd:lr=0.3,momentum=0.9")},
}
EVERY_DAY = ("clipped and weighted", "helper processes", "differences", "shared memory")


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    "settings",
    [pytest.param(EACH[each], id=each, marks=[] if each in EVERY_DAY else pytest.mark.slow) for each in EACH],
)
def test_one_worker_and_three_make_the_same_bits(store: Store, settings: dict[str, Any]) -> None:
    settings = {"epochs": 1, "units": UNITS, "units_per_epoch": UNITS, "units_per_round": 4} | settings
    shas = set()
    for workers in (1, 3):
        job = digits_job(store, workers=workers, worker_timeout_ms=60_000, **settings)
        run_workers(job, *training(job, *(f"w{i}" for i in range(workers))))
        shas.add(proved(job).weights_sha256)
        assert job.state().units_done == job.config.units
        store.remove_job(job.name)
    assert len(shas) == 1


def test_in_ssp_versions_are_whole_rounds_too(store: Store) -> None:
    job = digits_job(store, workers=3, staleness=2, epochs=1, units=UNITS, units_per_round=4, worker_timeout_ms=60_000)
    run_workers(job, *training(job, "w0", "w1", "w2"))
    proved(job)
    assert [len(commit.plan.contributions) for commit in job.log()] == [4, 4, 4, 3]
