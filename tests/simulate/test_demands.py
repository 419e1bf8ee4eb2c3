"""Who sends which bytes: what the simulation says, against what a real server counts."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from kvps_aggregator import Aggregator, Outcome
from kvps_simulate.demands import NODE_IN, NODE_OUT, REDIS, Demands
from kvps_simulate.settings import Constants, Setting

from kvps.store import Store

CONSTANTS = Constants.load()
_ROUNDS = 3


@pytest.mark.parametrize("formats", [("int8", "bf16"), ("topk:0.01", "fp32")])
def test_a_round_moves_the_bytes_that_a_real_server_counts(store: Store, formats: tuple[str, str]) -> None:
    workers, shards, items = 3, 2, 1_500_000
    settings = {"gradient_format": formats[0], "weight_format": formats[1]}
    wanted = Demands(Setting(workers=workers, shards=shards, size=4 * items, **settings), CONSTANTS).round_bytes()  # type: ignore[arg-type]
    gradient = {"w": np.random.default_rng(0).standard_normal(items, np.float32)}
    job = store.create_job(
        "bytes", {"w": np.zeros(items, np.float32)}, workers=workers, shards=shards, transport="redis", **settings
    )
    sessions = [job.join(f"w{i}") for i in range(workers)]
    aggregator = Aggregator(job, threading.Event())
    aggregator.hold(at_once=True)

    def counted() -> tuple[int, int]:
        stats = job.access.client.call("INFO", "stats")
        return int(stats["total_net_input_bytes"]), int(stats["total_net_output_bytes"])

    before = counted()
    for _ in range(_ROUNDS):
        for session in sessions:
            session.pull()
        for session in sessions:
            session.push(gradient)
        while aggregator.work() is not Outcome.IDLE:
            pass
    received, sent = (now - then for now, then in zip(counted(), before, strict=True))
    for session in sessions:
        session.leave(finished=False)
    aggregator.release()
    assert received / _ROUNDS == pytest.approx(wanted["in"], rel=0.02)
    assert sent / _ROUNDS == pytest.approx(wanted["out"], rel=0.02)


def test_the_fullest_node_decides() -> None:
    even, odd = (Demands(Setting(workers=4, nodes=3, shards=n), CONSTANTS) for n in (3, 4))
    assert even.push.shared[REDIS] < odd.push.shared[REDIS]
    assert odd.node_part == 0.5


def test_links_carry_what_passes_between_hosts_and_no_more() -> None:
    apart, local = (
        Demands(Setting(workers=4, nodes=4, local=local, bandwidth=8e6, size=4e6), CONSTANTS) for local in (False, True)
    )
    assert apart.push.shared[NODE_IN] == pytest.approx(1.0)
    assert NODE_OUT in apart.aggregate(4, 0).shared
    assert not {NODE_IN, NODE_OUT} & {*local.push.shared, *local.pull.shared, *local.aggregate(4, 0).shared}
