"""Rounds of units: a version is made of exactly the units of its round, whoever computes them, dies, or is slow."""

from __future__ import annotations

from collections import Counter
from functools import partial

import numpy as np
import pytest
from helpers.digits_job import run_workers
from helpers.harness import aggregating, await_version, check_chain, log_entries
from helpers.units import PATIENT, ZERO, do_units, grads, used
from helpers.waiting import eventually

import kvps
from kvps.job import Job
from kvps.store import Store

pytestmark = pytest.mark.contract


def _gradient(params: dict[str, np.ndarray], unit: int) -> dict[str, np.ndarray]:
    """Return a gradient of which a sum depends on the order, and on the weights."""
    rng = np.random.default_rng(unit)
    size = np.float32(10 ** rng.uniform(-3, 3))
    return {name: np.tanh(3 * p + rng.normal(size=p.shape)).astype(np.float32) * size for name, p in params.items()}


def expected(job: Job) -> np.ndarray:
    """Return the weights that one process makes of all units, in NumPy."""
    rounds = job.config.unit_rounds
    assert rounds
    w = ZERO["x"].copy()
    for number in range(rounds.rounds):
        units = rounds.units_of(number)
        total = np.zeros(3, np.float32)
        for i, unit in enumerate(units):
            g = _gradient({"x": w}, unit)["x"]
            total = g.copy() if i == 0 else total + g
        w = w - np.float32(job.config.optimizer.lr) * (total / np.float32(len(units)))
    return w


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_the_weights_are_the_same_whoever_trained(store: Store, workers: int) -> None:
    settings = {"units": 22, "units_per_epoch": 11, "units_per_round": 4, "optimizer": kvps.SGD(lr=0.5)}
    job = store.create_job("job", ZERO, workers=workers, shards=2, **settings | PATIENT)
    run_workers(job, *(partial(do_units, job, f"w{i}", _gradient) for i in range(workers)))
    assert [[c.unit for c in commit.plan.contributions] for commit in job.log()] == [
        *([0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]),
        *([11, 12, 13, 14], [15, 16, 17, 18], [19, 20, 21]),
    ]
    assert all(c.base == commit.version - 1 for commit in job.log() for c in commit.plan.contributions)
    np.testing.assert_array_equal(job.snapshot()[1]["x"], expected(job))
    check_chain(job)


@pytest.mark.parametrize(("staleness", "shards"), [(0, 1), (2, 2)])
def test_each_unit_counts_once_though_workers_come_and_die(store: Store, staleness: int, shards: int) -> None:
    """Five workers come one after another to a job of one; some die in the middle of a unit, once each."""
    units, dies_at, died = 60, {0, 7, 8, 31, 58, 59}, set[int]()
    settings = {"units": units, "units_per_round": 7, "optimizer": kvps.SGD(lr=0.5)}
    job = store.create_job("job", ZERO, staleness=staleness, shards=shards, **settings | PATIENT)
    run_workers(job, *(partial(do_units, job, f"w{i}", _gradient, dies_at, died) for i in range(5)))
    assert died == dies_at
    assert used(job) == dict.fromkeys(range(units), 1)
    rounds = job.config.unit_rounds
    assert rounds
    for commit in job.log():
        round_ = commit.version - 1
        assert [c.unit for c in commit.plan.contributions] == list(rounds.units_of(round_))
        assert all(round_ - staleness <= c.base <= round_ for c in commit.plan.contributions)
    assert job.access.client.call("HGETALL", job.access.keys.units) == {"next": str(units), "done": str(units)}
    assert not job.access.client.call("EXISTS", job.access.keys.taken_units)
    if not staleness:
        np.testing.assert_array_equal(job.snapshot()[1]["x"], expected(job))
    check_chain(job)


def test_one_worker_ends_what_three_had_begun_before_a_checkpoint(store: Store) -> None:
    settings = {"units": 12, "units_per_round": 3, "optimizer": kvps.SGD(lr=0.5), "worker_timeout_ms": 1000}
    job = store.create_job("job", ZERO, workers=3, **settings)
    sessions = [job.join(f"w{i}") for i in range(3)]
    for session in sessions:
        unit = session.next_unit()
        assert unit is not None
        session.push(_gradient(session.pull(), unit))
    with aggregating(job):
        await_version(job, 1)
    restored = store.restore_job(job.checkpoint(), "restored")
    for session in sessions:
        session.leave(finished=False)
    run_workers(restored, partial(do_units, restored, "w0", _gradient))
    np.testing.assert_array_equal(restored.snapshot()[1]["x"], expected(job))


def test_a_late_unit_is_handed_out_a_second_time_and_the_first_push_counts(store: Store) -> None:
    job = store.create_job("job", ZERO, workers=2, units=2, units_per_round=2, backup_after=3, **PATIENT)
    slow, quick = job.join("w0"), job.join("w1")
    assert slow.next_unit() == 0
    slow_params = slow.pull()
    assert quick.next_unit() == 1
    quick.push(_gradient(quick.pull(), 1))
    assert quick.next_unit() == 0, "once it is out for three times as long as the other was"
    units = job.access.keys.units
    assert job.access.client.call("HGET", units, "0") == "w0 computes, w1 computes"
    quick.push(_gradient(quick.pull(), 0))
    assert job.access.client.call("HGET", units, "0") == "w1 pushed, w0 computes"
    assert slow.push(_gradient(slow_params, 0)) == 0, "its clock stays"
    assert (slow.duplicates, quick.duplicates) == (1, 0)
    with aggregating(job):
        await_version(job, 1)
    assert [slow.next_unit(), quick.next_unit()] == [None, None]
    slow.leave()
    quick.leave()
    assert used(job) == {0: 1, 1: 1}
    kinds = Counter(fields["kind"] for _, fields in log_entries(job))
    assert (kinds["backup"], kinds["duplicate"]) == (1, 1)


@pytest.mark.parametrize("first_gone", ["w0", "w1"])
def test_a_unit_that_two_compute_is_free_when_both_are_gone(store: Store, first_gone: str) -> None:
    job = store.create_job("job", ZERO, workers=2, units=2, units_per_round=2, **PATIENT)
    sessions = {name: job.join(name) for name in ("w0", "w1")}
    assert sessions["w0"].next_unit() == 0
    assert sessions["w1"].next_unit() == 1
    sessions["w1"].push(_gradient(sessions["w1"].pull(), 1))
    assert sessions["w1"].next_unit() == 0
    second = {"w0": "w1", "w1": "w0"}[first_gone]
    for gone, state in ((first_gone, f"{second} computes"), (second, "free")):
        job.evict(job.state().members[gone])
        assert job.access.client.call("HGET", job.access.keys.units, "0") == state


def test_a_damaged_unit_is_computed_again_before_its_version_is_made(store: Store) -> None:
    settings = {"units": 3, "units_per_round": 3, "optimizer": kvps.SGD(lr=0.5)} | PATIENT
    job = store.create_job("job", ZERO, **settings)
    with job.join("w0") as session:
        for unit in range(3):
            assert session.next_unit() == unit
            session.push(_gradient(session.pull(), unit))
        store.client.call("SETRANGE", job.access.keys.gradient(0, "w0", session.incarnation, 2, 0), 0, "bad!")
        with aggregating(job):
            assert eventually(lambda: job.access.client.call("HGET", job.access.keys.units, "1") == "free")
            assert job.state().version == 0
            assert session.next_unit() == 1
            session.push(_gradient(session.pull(), 1))
            await_version(job, 1)
        assert session.next_unit() is None
    np.testing.assert_array_equal(job.snapshot()[1]["x"], expected(job))
    check_chain(job)


def test_an_outlier_is_left_out_for_good_or_its_round_would_never_end(store: Store) -> None:
    settings = {"units": 4, "units_per_round": 4, "reject_norm": 10.0, "optimizer": kvps.SGD(lr=1.0)} | PATIENT
    job = store.create_job("job", ZERO, **settings)
    with aggregating(job), job.join("w0") as session:
        for unit in range(4):
            assert session.next_unit() == unit
            session.pull()
            session.push(grads(1e6 if unit == 2 else 1.0))
        await_version(job, 1)
        assert session.next_unit() is None
    assert job.state().units_done == 4
    check_chain(job)


def test_weights_are_kept_for_the_units_of_one_version_and_a_pull_is_due_for_the_next(store: Store) -> None:
    job = store.create_job("job", ZERO, units=4, units_per_round=2, optimizer=kvps.SGD(lr=1.0), **PATIENT)
    with aggregating(job), job.join("w0") as session:
        assert session.next_unit() == 0
        session.pull()
        session.push(grads(1))
        assert session.next_unit() == 1
        with pytest.raises(kvps.WrongOrder, match="pull"):
            session.push(grads(1))
        session.pull()
        session.push(grads(1))
        await_version(job, 1)
        assert session.next_unit() == 2
        np.testing.assert_array_equal(session.pull()["x"], [-1, -1, -1])
        session.push(grads(1))


def test_push_is_fenced_by_the_version_of_its_unit(store: Store) -> None:
    """The session asks for a pull before; this is for a worker that does not."""
    job = store.create_job("job", ZERO, staleness=1, units=6, units_per_round=1, **PATIENT)
    session, state = job.join("w0"), job.state()
    scripts = job.access.scripts
    with aggregating(job):
        for unit in range(2):
            assert session.next_unit() == unit
            session.pull()
            session.push(grads(1))
        await_version(job, 2)
    assert session.next_unit() == 2
    with pytest.raises(kvps.WrongOrder, match="BASE"):
        scripts.push("w0", session.incarnation, 3, 0, 1, "0", state.history, 2)
    session.leave(finished=False)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"units": 0}, "set units too"),
        ({"quorum": 1}, "leave quorum out"),
        ({"gradient_format": "int8"}, "choose fp32"),
        ({"units_per_epoch": 5}, "does not divide"),
        ({"units_per_round": 9_000, "staleness": 1}, "at most 10,000"),
    ],
)
def test_what_contradicts_rounds_of_units_is_refused(settings: dict[str, object], why: str) -> None:
    with pytest.raises(kvps.InvalidSetting, match=why):
        kvps.JobConfig(**{"units": 12, "units_per_round": 4} | settings)


def test_the_seed_of_a_unit_follows_from_the_jobs_seed_and_the_unit(store: Store) -> None:
    seeds = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        with store.create_job(name, ZERO, units=2, units_per_round=2, seed=seed, **PATIENT).join() as session:
            with pytest.raises(kvps.WrongOrder, match="next_unit"):
                _ = session.unit_seed
            session.next_unit()
            first = session.unit_seed
            session.pull()
            session.push(grads(1))
            session.next_unit()
            seeds.append((first, session.unit_seed))
    assert seeds[0] == seeds[1]
    assert len({*seeds[0], *seeds[2]}) == 4
