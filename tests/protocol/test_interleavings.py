"""Schedules that once broke the protocol, step by step on a real server. The model found them; see `model`."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

import numpy as np
import pytest
from kvps_aggregator import Aggregator, Outcome
from kvps_aggregator.shard import lifecycle, shard, storage_redis

import kvps
from kvps.session.session import Session
from kvps.store import Store

ONE = {"x": np.ones(2, np.float32)}


def _push(session: Session, value: float = 1.0) -> None:
    session.pull()
    session.push({"x": np.full(2, value, np.float32)})


def test_a_rejected_round_is_over_with_the_version_that_leaves_it_out(store: Store) -> None:
    """w1 has two rounds in one plan; that the second is rejected must not count the first as committed."""
    job = store.create_job("job", ONE, staleness=1)
    with job.join("w0") as session:
        _push(session)
        _push(session)
        plan = job.access.scripts.plan().plan
        assert plan
        term, *_ = job.access.scripts.acquire(0, "holder", 10_000, "nonce")
        job.access.scripts.reject(0, term, plan, plan.contributions[1], "because")
        assert job.state().members["w0"].round == 0
        assert not job.access.reader.round_state().admits(2, job.config)
        rest = job.access.scripts.plan().plan
        assert rest
        assert [(c.seq, r.seq) for c, r in zip(rest.contributions, rest.rejected, strict=True)] == [(1, 2)]
        assert job.access.scripts.ready(0, term, rest, "digest").flipped
        after = job.state().members["w0"]
        assert (after.clock, after.round, after.pending) == (1, 2, 0)


def test_who_joins_anew_does_not_skip_past_what_still_waits(store: Store) -> None:
    """w1's first round waits while w0 is two rounds ahead: its next life must not tell w0 that it is committed."""
    job = store.create_job("job", ONE, staleness=1, workers=2)
    behind = job.join("w1")
    with job.join("w0") as ahead:
        _push(ahead)
        _push(ahead)
        plan = job.access.scripts.plan().plan
        _push(behind)
        with job.join("w1", takeover=True) as again:
            assert again.round == 1
            assert job.state().members["w1"].round == 0
            assert plan
            term, *_ = job.access.scripts.acquire(0, "holder", 10_000, "nonce")
            assert job.access.scripts.ready(0, term, plan, "digest").flipped
            assert not job.access.reader.round_state().admits(2, job.config), "w0 waits for w1's first round"


def test_a_holder_that_overslept_does_not_go_on_from_what_was_rejected(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It staged a plan that was then replaced, slept while another committed the new one, and wakes."""
    job = store.create_job(
        "job", {"x": np.zeros(2, np.float32)}, workers=2, shards=2, reduction="sum", optimizer=kvps.SGD(lr=1.0)
    )
    stop = threading.Event()
    drowsy = store.job("job")
    sleeper, other, successor = Aggregator(drowsy, stop, [0]), Aggregator(job, stop, [1]), Aggregator(job, stop, [0])
    with job.join("w0") as w0, job.join("w1") as w1:
        _push(w0, 1)
        _push(w1, 10)
        store.client.call("SETRANGE", job.access.keys.gradient(1, "w0", w0.incarnation, 1, 0), 0, "bad!")
        for aggregator in (sleeper, other):
            aggregator.hold()
            aggregator.work()  # the sleeper stages shard 0; the other finds w0's part of shard 1 bad and rejects it
        seen = job.access.scripts.plan()
        assert seen.plan
        assert seen.plan.rejected
        store.client.call("DEL", job.access.keys.lease(0))
        successor.hold()
        successor.work()
        assert other.work() is Outcome.WORKED, "bytes of the rejected plan stand under its term: it takes another"
        assert other.work() is Outcome.COMMITTED, "this commits version 1, without w0's"
        successor.work()  # it goes on from version 1 and frees the gradients
        successor.release()
        with monkeypatch.context() as slept:  # it had looked at the plan before it fell asleep
            slept.setattr(drowsy.access.scripts, "plan", lambda _: seen)
            sleeper.work()
        sleeper.work()
        _push(w0, 100)
        _push(w1, 1000)
        # Its lease renewal may have told it meanwhile; either way it reads what is committed before it goes on.
        while job.state().version < 2:
            for aggregator in (sleeper, other):
                aggregator.hold(at_once=True)
                aggregator.work()
        np.testing.assert_array_equal(job.snapshot()[1]["x"], [-1110, -1110])
    for aggregator in (sleeper, other):
        aggregator.release()


def test_what_was_rejected_is_settled_in_a_new_life_of_the_server_too(store: Store) -> None:
    """Till its version is committed it stands in the plan alone: its worker's round and its unit must not be lost."""
    job = store.create_job("job", ONE, units=1)
    session = job.join("w0")
    assert session.next_unit() == 0
    _push(session)
    plan = job.access.scripts.plan().plan
    assert plan
    term, *_ = job.access.scripts.acquire(0, "holder", 10_000, "nonce")
    job.access.scripts.reject(0, term, plan, plan.contributions[0], "because")
    for run_id in ("another life", store.client.run_id()):
        job.access.scripts.recover(run_id, run_id[:8], 0)
    rest = job.access.scripts.plan().plan
    assert rest
    term, *_ = job.access.scripts.acquire(0, "holder", 10_000, "nonce")
    assert job.access.scripts.ready(0, term, rest, "digest").flipped
    assert job.state().members["w0"].pending == 0
    with job.join("w0") as again:
        assert again.round == 1
        assert again.next_unit() == 0


def test_a_holder_that_overslept_its_reading_stands_by(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """It took the shard, slept, and what it was to read is freed: that is a lost lease, and no damage."""
    monkeypatch.setattr(lifecycle, "_LINGER_VERSIONS", 2)
    monkeypatch.setattr(storage_redis, "_FEW_KEYS", 1)
    job = store.create_job("job", {"x": np.zeros(2, np.float32)}, reduction="sum", optimizer=kvps.SGD(lr=1.0))
    stop = threading.Event()
    sleeper, other = Aggregator(store.job("job"), stop), Aggregator(job, stop)
    with job.join("w0") as w0:
        load = shard.Shard.load

        def sleep_before(self: shard.Shard, *arguments: Any) -> None:
            monkeypatch.setattr(shard.Shard, "load", load)
            store.client.call("DEL", job.access.keys.lease(0))
            other.hold()
            for number in range(3):
                _push(w0, number)
                assert other.work() is Outcome.COMMITTED
            load(self, *arguments)

        monkeypatch.setattr(shard.Shard, "load", sleep_before)
        sleeper.hold()
        assert not sleeper.held.shards
        _push(w0, 3)
        assert other.work() is Outcome.COMMITTED
    sleeper.release()
    other.release()
    assert job.snapshot()[0] == 4


@pytest.mark.parametrize("field", ["head", "version", "id"])
def test_an_open_plan_that_never_fits_ends_its_aggregator(store: Store, field: str) -> None:
    """It looped at thousands of commands a second."""
    job = store.create_job("job", {"x": np.zeros(2, np.float32)})
    aggregator = Aggregator(job, threading.Event())
    aggregator.hold()
    with job.join("w0") as w0:
        _push(w0, 0)
        plan = job.access.scripts.plan().plan
        assert plan is not None
        store.client.call("HSET", job.access.keys.plan, field, "7" * 40 if field == "head" else "7")
        with pytest.raises(kvps.CorruptData, match="does not fit the job's version"):
            deque((aggregator.work() for _ in range(100)), maxlen=0)
    assert job.state().version == 0
    aggregator.release()
