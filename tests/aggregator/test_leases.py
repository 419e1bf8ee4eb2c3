"""Who is silent, and for how long: of what stands still for a while, and of times that lie in the future.

Those count as now: the server's clock was set back, as when a virtual machine is resumed.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from helpers.commands import KVPS, Started
from helpers.harness import aggregating, check_chain, gradient, model, work_on
from helpers.internals import fall_silent
from helpers.waiting import eventually

import kvps
from kvps.job import Job
from kvps.store import Store

HOUR_MS = 3_600_000
ME = {"host": "here", "pid": 1, "start": "", "space": "", "device": "cpu"}


def _in_an_hour(job: Job) -> int:
    seconds, _ = job.access.client.call("TIME")
    return int(seconds) * 1000 + HOUR_MS


def test_a_dead_worker_with_a_sign_of_life_from_the_future_is_evicted(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    """Its heartbeat was written by the clock as it was before; BSP would wait for it for an hour."""
    job = store.create_job("job", model(), workers=2, worker_timeout_ms=1000)
    dead = job.join("w1")
    fall_silent(dead)
    keys, client = job.access.keys, job.access.client
    client.call("ZADD", keys.heartbeat, _in_an_hour(job), "w1", _in_an_hour(job), "")
    client.call("ZADD", keys.aggregators, _in_an_hour(job), "dead")
    with aggregating(job):
        work_on(job, "w0", 3)
        assert eventually(lambda: job.state().version == 3)
        assert eventually(lambda: client.call("ZSCORE", keys.aggregators, "dead") is None), "it does not stand by"
    assert job.state().members["w1"].state == "gone"
    assert check_chain(job) == 3
    lines = [record.message for record in caplog.records if "clock was set back" in record.message]
    assert len(lines) == 1, lines
    assert "job job: the server's clock was set back: signs of life lay 35" in lines[0]


def test_a_live_worker_is_not_evicted_when_the_clock_is_set_back(store: Store) -> None:
    job = store.create_job("job", model(), workers=1, worker_timeout_ms=500)
    with job.join("w0") as session, aggregating(job):
        job.access.client.call("ZADD", job.access.keys.heartbeat, _in_an_hour(job), "w0", _in_an_hour(job), "")
        looks = [job.access.scripts.evict() for _ in range(20)]
        assert [look.workers for look in looks] == [[]] * 20
        assert eventually(lambda: _beat(job, "w0") < _in_an_hour(job) - HOUR_MS / 2)
        for round_ in range(3):
            session.push(gradient(session.pull(), 0, round_))


def _beat(job: Job, worker: str) -> float:
    return float(job.access.client.call("ZSCORE", job.access.keys.heartbeat, worker))


def test_an_id_whose_sign_of_life_lies_in_the_future_is_free_after_the_timeout(store: Store) -> None:
    """Also where no aggregator looks for the silent."""
    job = store.create_job("job", model(), workers=1, worker_timeout_ms=300)
    first = job.access.scripts.join("w0", "abc", "", ME)
    job.access.client.call("ZADD", job.access.keys.heartbeat, _in_an_hour(job), "w0")
    with pytest.raises(kvps.WorkerAlive):
        job.access.scripts.join("w0", "next", "", ME)

    def joins() -> bool:
        try:
            return job.access.scripts.join("w0", "next", "", ME).incarnation != first.incarnation
        except kvps.WorkerAlive:
            return False

    assert eventually(joins)


def test_a_lease_from_the_future_ends_as_one_taken_now(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    """Redis keeps the moment when a lease ends: of a dead holder it would have been in an hour."""
    job = store.create_job("job", model(), workers=1, lease_ms=500)
    term = job.access.scripts.acquire(0, "dead", 500, "abcd").term
    job.access.client.call("PEXPIRE", job.access.keys.lease(0), HOUR_MS)
    with aggregating(job):
        work_on(job, "w0", 3)
        assert eventually(lambda: job.state().version == 3)
    assert job.access.reader.terms() != [term]
    assert any("clock was set back: the lease of shard 0 lay" in r.message for r in caplog.records)


def test_a_pin_from_the_future_is_not_read_for_ever(store: Store) -> None:
    job = store.create_job("job", {"x": np.zeros(1, np.float32)}, workers=1)
    pin = job.access.scripts.pin(5_000)
    with aggregating(job):
        work_on(job, "w0", 3)
        assert eventually(lambda: job.state().version == 3)
    assert job.access.scripts.pin(5_000) == pin, "one that is young is shared"
    job.access.client.call("PEXPIRE", job.access.keys.pin, HOUR_MS)
    assert '"version":3' in job.access.scripts.pin(5_000)


HOLDS = """
import ctypes, os

def first(contributions, weights, out, xp):
    if "HOLDS" in os.environ:
        ctypes.PyDLL(None).usleep(700_000)  # unlike a CDLL, it keeps the interpreter's lock
    xp.copyto(out, contributions[0])
"""


@pytest.mark.slow
def test_aggregators_whose_steps_hold_the_interpreters_lock_for_longer_than_the_lease_commit(
    store: Store, own_rules: Path
) -> None:
    """Each took the shard from the other in the middle of its step, for ever."""
    (own_rules / "holds.py").write_text(HOLDS)
    job = store.create_job("job", {"x": np.zeros(1, np.float32)}, lease_ms=300, reduction="holds:first")
    with ExitStack() as stack:
        for _ in range(2):
            environment = os.environ | {"KVPS_REDIS_URL": store.url, "HOLDS": "1"}
            serving = Started([*KVPS, "aggregator", "start", "--job", "job"], environment)
            stack.callback(serving.end)
        with job.join("w0") as session:
            session.push(session.pull())
        assert eventually(lambda: job.state().version == 1)
