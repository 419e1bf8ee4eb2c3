"""Simulated jobs, against what the protocol says of them and against times that can be computed by hand."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
from kvps_simulate.job import Job
from kvps_simulate.settings import Constants, Setting

FREE = Constants(defaultdict(float) | {name: defaultdict(float) for name in ("encode", "reduce", "decode", "step")})
"""Of a machine on which only links take time."""


def job(**settings: Any) -> Job:
    shown = {"size": 1e8, "bandwidth": 8e9, "latency_s": 0.0, "compute_s": 0.0, "rounds": 6, "workers": 1} | settings
    return Job(Setting(**shown), FREE).run()


@pytest.mark.parametrize("workers", [1, 7])
def test_workers_and_aggregator_share_the_link_of_a_node(workers: int) -> None:
    rounds = job(workers=workers).rounds
    assert len(rounds) == 5  # 0.1 s for each: the gradients come in and go out, then the weights come in and go out
    assert 0.2 * workers < rounds[-1][0] <= 0.1 * (3 * workers + 1) + 1e-6
    assert rounds[-1] == pytest.approx([rounds[-1][0]] * workers)


def test_nodes_on_hosts_of_their_own_divide_the_bytes() -> None:
    one, four = (job(workers=8, nodes=n).rounds[-1][0] for n in (1, 4))
    assert four == pytest.approx(one / 4, rel=1e-3)


@pytest.mark.parametrize("staleness", [0, 1, 3, -1])
def test_no_contribution_is_lost(staleness: int) -> None:
    found = job(workers=5, staleness=staleness, compute_s=0.1, rounds=20)
    assert sum(number for _, number in found.commits) == 100
    assert [len(each) for each in found.rounds] == [5] * 19
    if staleness == 0:
        assert [number for _, number in found.commits] == [5] * 20
