"""BSP, SSP and ASP: bit-identity, the bound from both sides, and exact sums. Judged from weights and log."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from helpers.harness import aggregating, check_chain, gradient, model, plain_loop, staleness_used, work

import kvps
from kvps.session.session import Session
from kvps.store import Store

pytestmark = pytest.mark.contract

ROUNDS = 20


@pytest.mark.parametrize(("workers", "shards"), [(1, 3), (4, 3)])
def test_bsp_equals_the_plain_loop_bit_for_bit(store: Store, workers: int, shards: int) -> None:
    job = store.create_job("bits", model(), workers=workers, shards=shards, optimizer=kvps.SGD(lr=0.05))
    with aggregating(job):
        work(job, ROUNDS, lambda session, params, r: gradient(params, session.rank, r), workers)
    version, weights = job.snapshot()
    want = plain_loop(model(), workers, ROUNDS, 0.05)
    assert version == ROUNDS
    for name in want:
        assert weights[name].tobytes() == want[name].tobytes(), name
    assert check_chain(job) == ROUNDS


def test_two_aggregators_with_a_shard_each_give_the_same_bits(store: Store) -> None:
    job = store.create_job("two", model(), workers=2, shards=2, optimizer=kvps.SGD(lr=0.05))
    with aggregating(job, [0]), aggregating(job, [1]):
        work(job, ROUNDS, lambda session, params, r: gradient(params, session.rank, r), 2)
    want = plain_loop(model(), 2, ROUNDS, 0.05)
    for name, value in job.snapshot()[1].items():
        assert value.tobytes() == want[name].tobytes()


def test_an_aggregator_goes_on_with_the_optimizer_state_of_another(store: Store) -> None:
    """One run with one aggregator, one whose aggregator is replaced in the middle: the same weights."""
    results = []
    for name, breaks in (("whole", 1), ("broken", 3)):
        job = store.create_job(name, model(), optimizer=kvps.AdamW(), shards=2)
        with job.join("w0") as session:
            for part in range(breaks):
                with aggregating(job):
                    for round_ in range(part * 12 // breaks, (part + 1) * 12 // breaks):
                        session.push(gradient(session.pull(), 0, round_))
        results.append([value.tobytes() for value in job.snapshot()[1].values()])
    assert results[0] == results[1]


@pytest.mark.parametrize(("staleness", "ahead"), [(0, 0), (1, 1), (3, 3), (-1, 8)])
def test_the_bound_holds_and_asp_goes_past_it(store: Store, staleness: int, ahead: int) -> None:
    """One of three workers is slow: in each round the others are as far ahead as they may be, in ASP 8 rounds. Read
    from the log, not from the workers' word."""
    workers, rounds = 3, 20
    begun, news = [0] * workers, threading.Condition()
    job = store.create_job("bound", model(), staleness=staleness, workers=workers, optimizer=kvps.SGD(lr=0.01))

    def step(session: Session, params: dict[str, np.ndarray], r: int) -> dict[str, np.ndarray]:
        with news:
            begun[session.rank] = r
            news.notify_all()
            assert session.rank or news.wait_for(lambda: min(begun[1:]) >= min(r + ahead, rounds - 1), 120)
        return gradient(params, session.rank, r)

    with aggregating(job):
        work(job, rounds, step, workers)
    assert job.state().clock == {f"w{i}": rounds for i in range(workers)}
    check_chain(job)
    used = staleness_used(job, workers)
    assert used == ahead or (staleness == -1 and used > ahead), "the bound is kept, and used to the full"


@pytest.mark.slow
def test_redis_holds_few_versions_whoever_aggregates(store: Store) -> None:
    """Two versions, and the memory for one more; that of a gradient, under its next name; no expiry on what counts."""
    job = store.create_job("few", {"x": np.zeros(4_500_000, np.float32)}, optimizer=kvps.SGD(momentum=0.9), shards=2)
    with job.join("w0") as session:
        for _ in range(3):
            with aggregating(job):
                for _ in range(4):
                    params = session.pull()
                    session.push({"x": params["x"] + 1})
    names = [key.split(":") for key in store.client.scan(job.access.keys.all_bytes)]
    assert {parts[2] for parts in names} == {"w", "opt.momentum", "m", "g", "owner"}
    assert {parts[4] for parts in names if parts[2] == "g"} == {"13"}, "the one that would come next"
    for shard in (job.access.keys.slot(0).split(":")[1], job.access.keys.slot(1).split(":")[1]):
        versions = {int(parts[3].split(".")[0]) for parts in names if parts[1] == shard and parts[2] in ("w", "m")}
        assert versions == {11, 12, 13}
        assert {parts[3].split(".")[0] for parts in names if parts[1] == shard and parts[2] == "m"} == {"11", "12"}
    lasting = [k for k in store.client.scan("*") if store.client.call("PTTL", k) != -1]
    assert lasting in ([], ["kvps:preflight"])


@pytest.mark.parametrize("staleness", [3, -1])
def test_nobody_runs_ahead_before_all_have_joined(store: Store, staleness: int) -> None:
    """Or gradients of version 0 pile up, and the first version applies them all at once."""
    job = store.create_job("early", {"x": np.zeros(1, np.float32)}, staleness=staleness, workers=2)
    done = threading.Event()

    def early() -> None:
        with job.join("w0") as session:
            for _ in range(3):
                session.push(session.pull())
            done.set()

    with aggregating(job):
        thread = threading.Thread(target=early)
        thread.start()
        assert not done.wait(0.3)
        assert job.access.client.call("XLEN", job.access.keys.inbox) == 1
        with job.join("w1"):
            assert done.wait(120)
        thread.join()


def test_schedules_run_over_progress(store: Store) -> None:
    """The n-th commit of BSP steps with the rate at n - 1 contributions per worker."""
    schedule = kvps.schedules.LinearLR(1.0, 0.0, over=4)
    job = store.create_job("lr", {"x": np.zeros(1, np.float32)}, workers=2, optimizer=kvps.SGD(lr=schedule))
    with aggregating(job):
        work(job, 5, lambda session, params, r: {"x": np.ones(1, np.float32)}, 2)
    assert job.snapshot()[1]["x"][0] == -(1.0 + 0.75 + 0.5 + 0.25 + 0.0)
