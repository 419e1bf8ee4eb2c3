"""Simulated jobs, against what the protocol says of them and against times that can be computed by hand."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from kvps_simulate.job import Job, Record
from kvps_simulate.settings import Constants, Setting

FREE = Constants(
    **{
        f.name: dict.fromkeys(("fp32", "bf16", "fp16", "int8", "topk", "sgd", "momentum", "adagrad", "adam"), 0.0)
        if "Mapping" in str(f.type)
        else 0.0
        for f in fields(Constants)
    }
)
"""Of a machine on which only links take time."""


def job(constants: Constants = FREE, **settings: Any) -> Record:
    shown = {"size": 1e8, "bandwidth": 8e9, "latency_s": 0.0, "compute_s": 0.0, "rounds": 6, "workers": 1} | settings
    return Job(Setting(**shown), constants).run()


@pytest.mark.parametrize("workers", [1, 7])
def test_workers_share_the_link_of_a_node(workers: int) -> None:
    record = job(topology="one-host", workers=workers)
    assert len(record.rounds) == 5  # 0.1 s each way; the aggregator is beside the data
    assert record.rounds[-1] == pytest.approx([0.2 * workers] * workers, rel=1e-3)


def test_nodes_on_hosts_of_their_own_divide_the_bytes() -> None:
    one, four = (job(workers=8, nodes=n).rounds[-1][0] for n in (1, 4))
    assert four == pytest.approx(one / 4, rel=1e-3)


def test_shards_beside_workers_move_no_more_over_a_link_than_a_ring_does() -> None:
    # 3/4 of the model goes out and comes in while pushing, and the same while pulling.
    record = job(topology="beside", workers=4, nodes=4)
    assert record.rounds[-1] == pytest.approx([0.15] * 4, rel=1e-3)


def test_bsp_waits_for_the_slowest_and_asp_does_not() -> None:
    common = {"workers": 4, "compute_s": 1.0, "size": 4e3, "slow": 0.3, "slow_by": 10.0, "rounds": 30, "seed": 1}
    ends = {staleness: job(staleness=staleness, **common).end_s for staleness in (0, 3, -1)}
    assert ends[0] > ends[3] > ends[-1]
    bsp = Job(Setting(**common), FREE)
    drawn = iter([1.0, 1.0, 10.0, 1.0] * 100)
    bsp._compute_s = lambda: next(drawn)  # type: ignore[method-assign]
    assert bsp.run().rounds[-1] == pytest.approx([10.0] * 4, rel=1e-3)


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_no_contribution_is_lost_and_the_bound_holds(staleness: int) -> None:
    record = job(workers=5, staleness=staleness, compute_s=0.1, jitter=1.0, rounds=20)
    assert sum(number for _, number in record.commits) == 100
    assert [len(each) for each in record.rounds] == [5] * 19
    if staleness == 0:
        assert set(record.staleness) == {0}
        assert len(record.commits) == 20


def test_the_seed_decides() -> None:
    chance = {"workers": 6, "compute_s": 0.1, "jitter": 0.5, "worker_failures": 500, "node_failures": 50, "rounds": 50}
    first, again, other = (job(seed=seed, **chance) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_a_dead_worker_is_waited_for_until_it_is_evicted() -> None:
    common = {"workers": 4, "compute_s": 1.0, "rounds": 200, "size": 4e3, "worker_failures": 20.0}
    soon, late = job(restart_s=2.0, **common), job(restart_s=60.0, detect_s=10.0, **common)
    assert soon.lost > 0
    assert not soon.evictions
    assert late.evictions == late.lost > 0
    assert soon.end_s == pytest.approx(200 + 2.5 * soon.lost, rel=0.05)
    assert late.end_s < 200 + 60 * late.lost  # others go on without it


def test_a_data_node_that_fails_stops_everybody() -> None:
    common = {"workers": 2, "compute_s": 1.0, "rounds": 1000, "size": 4e3}
    record = job(Constants.load(), node_failures=20.0, failover_s=30.0, **common)
    assert record.failovers > 2
    assert 1000 + 29 * (record.failovers - 1) < record.end_s < 1100 + 31 * record.failovers


@pytest.mark.slow
def test_ten_thousand_workers_take_a_bounded_number_of_changes() -> None:
    setting = Setting(workers=10_000, nodes=64, shards=256, size=10e9, jitter=0.2, rounds=2)
    record = Job(setting, Constants.load()).run()
    assert record.changes < 2 * 5_000
    assert [len(each) for each in record.rounds] == [10_000]


def test_large_jobs_are_stepped_and_still_take_their_time() -> None:
    setting = Setting(workers=80, topology="one-host", size=1e8, bandwidth=8e9, latency_s=0, compute_s=0.0, rounds=4)
    assert Job(setting, FREE).run().rounds[-1][0] == pytest.approx(16.0, rel=0.02)
    few = replace(setting, workers=64)
    assert Job(few, FREE).run().rounds[-1][0] == pytest.approx(12.8, rel=1e-3)
