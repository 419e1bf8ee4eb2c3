"""How far a design goes: the sweep, and what it says breaks first."""

from __future__ import annotations

from kvps_simulate.settings import Constants, Setting
from kvps_simulate.sweep import limits, sweep


def test_more_nodes_carry_more_workers() -> None:
    setting = Setting(size=1e9, bandwidth=25e9, compute_s=5.0, rounds=3)
    swept = sweep(setting, Constants.load(), workers=(1, 8, 64), nodes=(1, 16))
    assert [(r.setting.nodes, r.setting.workers) for r in swept] == [(n, w) for n in (1, 16) for w in (1, 8, 64)]
    one, sixteen = limits(swept)
    assert one.workers < sixteen.workers
    assert one.bottleneck


def test_nodes_beside_workers_are_no_more_than_the_workers() -> None:
    swept = sweep(Setting(topology="beside", size=4e6, rounds=2), Constants.load(), workers=(2, 4), nodes=(1, 4))
    assert [(r.setting.nodes, r.setting.workers) for r in swept] == [(1, 2), (1, 4), (4, 4)]
