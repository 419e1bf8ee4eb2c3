"""Units of data: over a run each counts once, whoever takes it, dies with it, or comes back."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from helpers.digits_job import digits_job, run_workers
from helpers.harness import aggregating, await_version, check_chain
from helpers.internals import fall_silent
from helpers.units import PATIENT, ZERO, do_units, grads, used
from kvps_workers import load_task
from kvps_workers.training_loop import train

import kvps
from kvps.device.base import CPU
from kvps.session.session import Session
from kvps.store import Store

pytestmark = pytest.mark.contract


@pytest.mark.parametrize(("staleness", "shards"), [(0, 1), (2, 2), (-1, 2)])
def test_each_unit_is_committed_once_though_workers_die(store: Store, staleness: int, shards: int) -> None:
    """The last units too: who has none left joins again for those that come back."""
    units, dies_at, died = 60, {0, 7, 8, 31, 58, 59}, set[int]()
    settings = {"reduction": "sum", "optimizer": kvps.SGD(lr=1.0)} | PATIENT
    job = store.create_job("job", ZERO, workers=3, staleness=staleness, shards=shards, units=units, **settings)
    gradient = lambda _, unit: grads(unit + 1)  # noqa: E731
    run_workers(job, *(partial(do_units, job, f"w{i}", gradient, dies_at, died) for i in range(3)))
    assert died == dies_at
    assert used(job) == dict.fromkeys(range(units), 1)
    assert job.access.client.call("HGETALL", job.access.keys.units) == {"next": str(units), "done": str(units)}
    np.testing.assert_array_equal(job.snapshot()[1]["x"], np.full(3, -sum(range(1, units + 1)), np.float32))
    check_chain(job)


def test_a_unit_is_the_workers_until_it_is_pushed_evicted_or_has_left(store: Store) -> None:
    job = store.create_job("job", ZERO, workers=3, staleness=-1, units=4, **PATIENT)
    w0, w1, w2 = (job.join(f"w{i}") for i in range(3))
    assert [s.next_unit() for s in (w0, w1, w2)] == [0, 1, 2]
    assert w0.next_unit() == 0, "the same until it is pushed"
    job.access.scripts.evict("w1", w1.incarnation)
    assert job.access.client.call("HGET", job.access.keys.units, "1") == "free"
    with pytest.raises(kvps.WorkerEvicted):
        w1.next_unit()
    w2.leave(finished=False)
    w0.pull()
    w0.push(grads(1))
    job.access.scripts.evict("w0", w0.incarnation)
    assert job.access.client.call("HGETALL", job.access.keys.units) == {
        "next": "3",
        "0": "w0 pushed",
        "1": "free",
        "2": "free",
    }
    with job.join("w1") as again:
        assert again.next_unit() == 1, "the first that came back"


def test_what_was_pushed_and_rejected_is_handed_out_again(store: Store) -> None:
    job = store.create_job("job", ZERO, units=2, staleness=-1, **PATIENT)
    with job.join("w0") as session:
        assert session.next_unit() == 0
        session.pull()
        session.push(grads(1))
        store.client.call("SETRANGE", job.access.keys.gradient(0, "w0", session.incarnation, 1, 0), 0, "bad!")
        with aggregating(job):
            await_version(job, 1)
        assert job.access.client.call("HGET", job.access.keys.units, "0") == "free"
        assert session.next_unit() == 0


def test_take_and_push_belong_together(store: Store) -> None:
    job = store.create_job("job", ZERO, units=2, **PATIENT)
    with job.join("w0") as session:
        session.pull()
        with pytest.raises(kvps.WrongOrder, match="next_unit"):
            session.push(grads(1))
    plain = store.create_job("plain", ZERO)
    with plain.join("w0") as session, pytest.raises(kvps.WrongOrder, match="units=N"):
        session.next_unit()


def test_push_is_fenced_by_its_unit(store: Store) -> None:
    job = store.create_job("job", ZERO, units=2, **PATIENT)
    session = job.join("w0")
    state = job.state()
    for unit in (None, 1):
        with pytest.raises(kvps.WrongOrder, match="UNIT"):
            job.access.scripts.push("w0", session.incarnation, 1, 0, 1, "0", state.history, unit)
    session.next_unit()
    with pytest.raises(kvps.WrongOrder, match="UNIT"):
        job.access.scripts.push("w0", session.incarnation, 1, 0, 1, "0", state.history, 1)
    assert job.access.scripts.push("w0", session.incarnation, 1, 0, 1, "0", state.history, 0).clock == 1


def test_any_number_of_workers_may_help(store: Store) -> None:
    job = store.create_job("job", ZERO, workers=1, units=9, task="digits", **PATIENT)
    helpers: list[Session] = [job.join() for _ in range(3)]
    assert [s.worker for s in helpers] == ["w0", "w1", "w2"]


def test_the_digits_by_units(store: Store) -> None:
    units = 2 * 45  # 1,438 training samples in batches of 32
    settings = {"workers": 2, "staleness": 1, "batch_size": 32, "epochs": 2, "optimizer": kvps.SGD(lr=0.5)}
    job = digits_job(store, units=units, **settings | PATIENT)
    run_workers(job, *[partial(train, job, CPU)] * 2)
    assert used(job) == dict.fromkeys(range(units), 1)
    assert load_task("digits").evaluate(job.snapshot()[1], np)["accuracy"] > 0.5


@pytest.mark.parametrize("unit", ["x", "-1", ""])
def test_a_free_unit_that_is_no_number_is_corrupt(store: Store, unit: str) -> None:
    """The script answered with nothing where the unit should be, and a worker raised IndexError."""
    job = store.create_job("a", ZERO, units=4)
    store.client.call("ZADD", job.access.keys.free_units, 0, unit)
    session = job.join("w0")
    for _ in range(2):
        with pytest.raises(kvps.CorruptData, match="the unit of worker 'w0'"):
            session.next_unit()
    fall_silent(session)
