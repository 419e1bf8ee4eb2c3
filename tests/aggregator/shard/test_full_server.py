"""Redis is full. Typed errors, nothing lost, and the job goes on by itself."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
from helpers.harness import check_chain
from helpers.servers import running_server
from kvps_aggregator import Aggregator, Outcome

import kvps
from kvps.connection.client import Client
from kvps.job import Job
from kvps.store import Store

SIZE = 300_000
BIG = {"x": np.zeros(SIZE, np.float32)}
SUM = {"reduction": "sum", "optimizer": kvps.SGD(lr=1.0), "worker_timeout_ms": 60_000, "lease_ms": 60_000}


def _grads(value: float) -> dict[str, np.ndarray]:
    return {"x": np.full(SIZE, value, np.float32)}


@pytest.fixture
def impatient(request: pytest.FixtureRequest) -> Iterator[Store]:
    """A store on a server with 64 MB, whose calls give up early."""
    with running_server("--maxmemory", "64mb") as url, Client(url, patience_s=0.2) as client:
        yield Store(client)


def _fill(store: Store, room: int) -> None:
    """Leave so much room and no more."""
    store.client.call("CONFIG", "SET", "maxmemory", store.client.memory()[0] + room)


@pytest.mark.slow
def test_a_server_full_of_gradients_drains_by_itself(impatient: Store) -> None:
    """There is no room to stage a version, until the reserve is given up. Again and again."""
    job = impatient.create_job("job", BIG, staleness=7, transport="redis", **SUM)
    aggregator = Aggregator(job, threading.Event())
    aggregator.hold()
    aggregator.sweep()
    pushed = refused = 0
    with job.join("w0") as session:
        for _ in range(10):
            _fill(impatient, 4 * SIZE * 3)
            while True:  # until it is full
                try:
                    session.pull()
                    session.push(_grads(1))
                    pushed += 1
                except kvps.ServerFull:
                    refused += 1
                    break
            assert aggregator.work() is Outcome.COMMITTED, "what waits is committed though the server is full"
            assert _until_quiet(aggregator) == 0
            session.push(_grads(1))  # the very one that was refused
            pushed += 1
            assert aggregator.work() is Outcome.COMMITTED
            aggregator.sweep()
        assert session.clock == pushed
    assert refused == 10
    assert pushed >= 20
    assert job.state().clock == {"w0": pushed}
    np.testing.assert_array_equal(job.snapshot()[1]["x"], np.full(SIZE, -pushed, np.float32))
    check_chain(job)
    aggregator.release()


def test_a_reserve_that_found_no_room_is_taken_by_a_later_commit(impatient: Store) -> None:
    """A commit gives the reserve up, and there is no room to take it again. A later commit does, without a sweep."""
    job = impatient.create_job("job", BIG, transport="redis", **SUM)
    aggregator = Aggregator(job, threading.Event())
    aggregator.hold()
    aggregator.sweep()
    reserve = job.access.keys.reserve(0, 0)
    assert impatient.client.call("EXISTS", reserve)
    with job.join("w0") as session:
        for limit in (None, 64 << 20):
            session.pull()
            session.push(_grads(1))
            if limit is None:
                _fill(impatient, 0)
            else:
                impatient.client.call("CONFIG", "SET", "maxmemory", limit)
            assert aggregator.work() is Outcome.COMMITTED
            assert impatient.client.call("EXISTS", reserve) == (limit is not None)
    aggregator.release()


def _until_quiet(aggregator: Aggregator) -> int:
    """Work until nothing is left; what still waits then."""
    while aggregator.work() is not Outcome.IDLE:
        pass
    job: Job = aggregator._job
    return int(job.access.client.call("XLEN", job.access.keys.inbox))


def test_all_but_what_takes_more_room_goes_on_when_memory_is_full(impatient: Store) -> None:
    job = impatient.create_job("job", BIG, workers=2, shards=2, units=9, staleness=1, **SUM)
    s = job.access.scripts
    w0, w1 = job.join("w0"), job.join("w1")
    w0.next_unit()
    w0.pull()
    w0.push(_grads(1))
    term, *_ = s.acquire(0, "me", 60_000, "nonce")
    other, *_ = s.acquire(1, "me", 60_000, "nonce2")
    impatient.client.call("CONFIG", "SET", "maxmemory", 1)
    for refused in (lambda: w1.next_unit(), lambda: job.join("w2"), lambda: job.join("w0", takeover=True)):
        with pytest.raises(kvps.ServerFull, match="out of memory"):
            refused()
    assert s.acquire(0, "me", 60_000, "new")[0] != term
    term = job.access.reader.terms()[0]
    s.own(0, term)
    assert s.renew(0, "me", term, 60_000)
    s.heartbeat("w0", w0.incarnation)
    assert s.pin(1000)
    plan = s.plan().plan
    s.reject(0, term, plan, plan.contributions[0], "because")
    plan = s.plan().plan
    assert not s.ready(0, term, plan, "digest").flipped
    assert s.ready(1, other, plan, "digest").flipped
    assert s.evict("w1", w1.incarnation).workers == ["w1"]
    w0.leave(finished=False)
    assert s.recover("another life", "abcd1234", 0) == (1, "abcd1234")
    s.free(0, term, "", [])


def test_a_job_that_cannot_fit_is_refused_before_anything_is_stored(impatient: Store) -> None:
    before = impatient.client.call("DBSIZE")
    with pytest.raises(kvps.ServerFull, match=r"needs 74\.1 MB and .* left of its maxmemory"):
        impatient.create_job("job", {"x": np.zeros(3_000_000, np.float32)}, transport="redis")
    assert impatient.client.call("DBSIZE") == before
    assert impatient.jobs() == []
