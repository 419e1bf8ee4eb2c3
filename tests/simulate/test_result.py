"""What a simulated run comes to."""

from __future__ import annotations

import pytest
from kvps_simulate.result import COMPUTING, SCRIPTS, simulate
from kvps_simulate.settings import Constants, Setting

CONSTANTS = Constants.load()


def test_a_result_names_what_is_busiest_and_adds_up() -> None:
    found = simulate(Setting(workers=4, compute_s=10.0, rounds=5), CONSTANTS)
    assert found.bottleneck == COMPUTING
    assert 0.9 < found.efficiency <= 1
    assert found.goodput == pytest.approx(4 / found.median_s, rel=0.02)
    assert found.versions == 5
    assert found.median_s <= found.p95_s
    assert all(0 <= part <= 1.001 for part in found.busy.values())
    assert SCRIPTS in found.busy
    assert found.to_dict()["setting"]["workers"] == 4


def test_a_slow_link_is_the_bottleneck() -> None:
    found = simulate(Setting(workers=8, bandwidth=1e9, topology="one-host", rounds=4), CONSTANTS)
    assert "link" in found.bottleneck
    assert found.node_in == pytest.approx(1e9 / 8 * found.busy["node link in"], rel=0.15)


@pytest.mark.slow
def test_what_kvps_itself_refuses_is_said() -> None:
    found = simulate(Setting(workers=5000, shards=1001, size=4e3, rounds=1), CONSTANTS)
    assert len(found.beyond) == 2
    assert "4,096 workers" in found.beyond[0]
