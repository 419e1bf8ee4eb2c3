"""Checkpoints: a restored job goes on as if nothing had been, on any server and with any number of shards."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.checkpoints import PATIENT, ROUNDS, STOP, bits, saved, train_to
from helpers.digits_job import run_workers
from helpers.harness import aggregating, check_chain, gradient, model, work
from helpers.servers import running_server
from helpers.waiting import eventually
from kvps_aggregator import Aggregator, serve
from kvps_aggregator.checkpoints import Checkpoints, KeptLog
from safetensors.numpy import load_file

import kvps
from kvps.history.checkpoint import Checkpoint
from kvps.history.checkpoint_directory import newest
from kvps.history.log_stream import LogStream
from kvps.session.session import Session
from kvps.store import Store


@pytest.fixture
def other() -> Iterator[Store]:
    """A store on another server."""
    with running_server() as url, kvps.connect(url) as store:
        yield store


# -- a restored job --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shards", "anew", "optimizer"),
    [
        (1, 3, kvps.Adam(kvps.schedules.CosineAnnealingLR(0.05, over=ROUNDS))),
        (3, None, kvps.SGD(0.05, momentum=0.9, nesterov=True)),
        pytest.param(3, 2, kvps.Adagrad(), marks=pytest.mark.slow),
    ],
)
def test_a_restored_bsp_job_ends_with_the_samebits(
    store: Store, other: Store, tmp_path: Path, optimizer: Any, shards: int, anew: int | None
) -> None:
    settings: dict[str, Any] = {"workers": 2, "shards": shards, "optimizer": optimizer} | PATIENT
    whole = store.create_job("whole", model(), **settings)
    train_to(whole, ROUNDS)
    job = store.create_job("job", model(), **settings)
    train_to(job, STOP)
    path = saved(job, tmp_path)
    assert load_file(path)["W"].tobytes() == bits(job)["W"], "safetensors alone reads the weights"
    for where, name in ((store, "again"), (other, "job")):
        restored = where.restore_job(Checkpoint.load(path), name, anew)
        assert bits(restored) == bits(job)
        assert (restored.layout.shards, restored.state().clock) == (anew or shards, {"w0": STOP, "w1": STOP})
        train_to(restored, ROUNDS)
        assert bits(restored) == bits(whole)
        assert restored.state().finished(restored.config)
        assert check_chain(restored) == ROUNDS
        assert restored.state().begin == (STOP, job.state().head, 2 * STOP)


@pytest.mark.parametrize("failed", [False, True], ids=["at work", "failed"])
def test_a_restored_bsp_job_waits_for_all_that_had_work_left(store: Store, tmp_path: Path, failed: bool) -> None:
    """Else the first to come back would go on alone, and to other bits. Nobody is evicted for not being there yet."""
    whole = store.create_job("whole", model(), workers=2, worker_timeout_ms=20_000)
    train_to(whole, STOP + 3)
    job = store.create_job("job", model(), workers=2, worker_timeout_ms=20_000)
    with aggregating(job):
        sessions = [job.join(f"w{i}") for i in range(2)]
        for _ in range(STOP):
            for session in sessions:
                grads = gradient(session.pull(), session.rank, session.round)
                session.push(grads)
        assert eventually(lambda: job.state().version == STOP)
        for session in sessions if failed else ():
            session.leave(finished=False)  # as where an error leaves the block
        path = saved(job, tmp_path)
    restored = store.restore_job(Checkpoint.load(path), "again")
    assert {m.state for m in restored.state().members.values()} == {"rejoining"}
    with aggregating(restored):
        for _ in range(3):
            restored.access.client.call("ZADD", restored.access.keys.heartbeat, 0, "w0", 0, "w1")
            restored.access.scripts.evict()
        with restored.join() as first:
            assert (first.worker, first.round, first.clock) == ("w0", STOP, STOP)
            first.push(gradient(first.pull(), 0, STOP))
            assert restored.access.scripts.plan().plan is None
            with restored.join() as second:
                second.push(gradient(second.pull(), 1, STOP))
                for _ in range(2):
                    for session in (first, second):
                        session.push(gradient(session.pull(), session.rank, session.round))
                assert eventually(lambda: restored.state().version == STOP + 3)
    assert bits(restored) == bits(whole)


def test_what_waits_in_the_inbox_is_done_again(store: Store, tmp_path: Path) -> None:
    """Saved between commits: the clocks are those of the version, and every round is committed once in the end."""
    job = store.create_job("job", model(), workers=2, staleness=1, **PATIENT)
    train_to(job, STOP)
    waiting = job.join("w0")
    waiting.push(gradient(waiting.pull(), 0, STOP))
    late = job.join("w1")
    late.push(gradient(late.pull(), 1, STOP))
    late.leave(finished=True)
    assert {m.worker: m.state for m in job.state().members.values()} == {"w0": "active", "w1": "draining"}
    restored = store.restore_job(Checkpoint.load(saved(job, tmp_path)), "again", 2)
    members = restored.state().members
    assert [(m.state, m.finished, m.pending, m.round) for m in members.values()] == [("rejoining", False, 0, STOP)] * 2
    train_to(restored, ROUNDS)
    assert restored.state().clock == {"w0": ROUNDS, "w1": ROUNDS}
    rounds = Counter((c.worker, c.round) for commit in restored.log() for c in commit.plan.contributions)
    assert rounds == {(f"w{i}", r): 1 for i in range(2) for r in range(STOP + 1, ROUNDS + 1)}
    assert restored.state().finished(restored.config)


def test_the_rest_of_the_units_is_done_exactly_once(store: Store, tmp_path: Path) -> None:
    zero = {"x": np.zeros(3, np.float32)}
    settings: dict[str, Any] = {"reduction": "sum", "optimizer": kvps.SGD(lr=1.0), "staleness": -1} | PATIENT
    job = store.create_job("job", zero, workers=2, units=12, **settings)
    w0, w1 = job.join("w0"), job.join("w1")
    aggregator = Aggregator(job, threading.Event())
    aggregator.hold()
    for session in (w0, w1, w0):
        unit = session.next_unit()
        session.push({name: array - array + unit + 1 for name, array in session.pull().items()})
        aggregator.work()
    aggregator.release()
    for session in (w0, w1):  # one has pushed, and one computes
        session.next_unit()
    w0.push({name: array - array + 99 for name, array in w0.pull().items()})
    assert len(job.access.client.call("HGETALL", job.access.keys.units)) == 4
    restored = store.restore_job(Checkpoint.load(saved(job, tmp_path)), "again")
    assert restored.access.client.call("HGETALL", restored.access.keys.units) == {
        "next": "5",
        "done": "3",
        "3": "free",
        "4": "free",
    }

    def rest(worker: str) -> None:
        with restored.join(worker) as session:
            while (unit := session.next_unit()) is not None:
                session.push({name: array - array + unit + 1 for name, array in session.pull().items()})

    run_workers(restored, partial(rest, "w0"), partial(rest, "w1"))
    assert Counter(c.unit for commit in restored.log() for c in commit.plan.contributions) == dict.fromkeys(
        range(3, 12), 1
    )
    np.testing.assert_array_equal(restored.snapshot()[1]["x"], np.full(3, -sum(range(1, 13)), np.float32))


def test_version_0_and_odd_names_are_kept(store: Store, tmp_path: Path) -> None:
    params = {name: np.full(2, i, np.float32) for i, name in enumerate(("opt.m/a", "_opt.m/a", "a", "digest", "ä b"))}
    job = store.create_job("job", params, optimizer=kvps.Adam(), **PATIENT)
    first = store.restore_job(Checkpoint.load(saved(job, tmp_path)), "first", 2)
    for each in (job, first):
        with aggregating(each):
            work(each, 3, lambda session, params, r: {name: array + r for name, array in params.items()}, 1)
            assert eventually(lambda each=each: each.state().version == 3)
    assert bits(job) == bits(first)
    made = Checkpoint.load(saved(job, tmp_path))
    assert sorted(made.slots) == ["m", "v"]
    assert bits(store.restore_job(made, "third")) == bits(job)
    assert LogStream(first.access).training_seconds() > 0
    with pytest.raises(kvps.JobExists, match="'third'"):
        store.restore_job(made, "third")
    with pytest.raises(kvps.InvalidSetting, match="shards"):
        store.restore_job(made, "fourth", 11)
    with pytest.raises(kvps.LayoutMismatch, match="__metadata__"):
        store.create_job("odd", {"__metadata__": np.zeros(2, np.float32)})


def test_one_version_is_saved_though_commits_go_on(store: Store) -> None:
    """Each is whole: weights, clock and head of one version, and the optimizer's state that goes with them."""
    job = store.create_job("job", model(), optimizer=kvps.SGD(0.01, momentum=0.9), shards=2, **PATIENT)
    made: list[Checkpoint] = []
    rounds = 100

    def step(session: Session, params: dict[str, np.ndarray], round_: int) -> dict[str, np.ndarray]:
        if round_ % 10 == 7:
            made.append(job.checkpoint())
        return {name: np.ones_like(array) for name, array in params.items()}

    with aggregating(job):
        work(job, rounds, step, 1)
        assert eventually(lambda: job.state().version == rounds)
    heads = {commit.version: commit.head for commit in job.log()}
    momentum = np.float32(0)
    by_version = {}
    for version in range(1, rounds + 1):
        momentum = momentum * np.float32(0.9) + np.float32(1)
        by_version[version] = momentum
    assert len(made) == 10
    for each in made:
        assert (each.head, each.clock) == (heads[each.version], {"w0": each.version})
        assert set(each.slots["momentum"]) == {by_version[each.version]}


def test_directories_may_be_named_as_text(store: Store, tmp_path: Path) -> None:
    job = store.create_job("job", model(), workers=1)
    with job.join("w0") as session:
        session.push(session.pull())
    serve(
        job,
        record=str(tmp_path / "record"),
        checkpoints=Checkpoints(str(tmp_path), 1),
        log_kept=KeptLog(0, str(tmp_path)),
    )
    assert any((tmp_path / "record").iterdir())
    assert [path.suffix for path in tmp_path.glob("*.safetensors")] == [".safetensors"]


def test_the_last_checkpoint_says_that_the_job_is_finished(store: Store, tmp_path: Path) -> None:
    """Its version was saved before, when the worker had not left: who resumed from that file would begin to train."""
    job = store.create_job("job", model(), workers=1)
    with ThreadPoolExecutor(1) as pool, job.join("w0") as session:
        serving = pool.submit(serve, job, checkpoints=Checkpoints(tmp_path, 1))
        session.push(session.pull())
        assert eventually(lambda: bool(found := newest(tmp_path, "job")) and not found.checkpoint.finished)
    serving.result()
    found = newest(tmp_path, "job")
    assert (found.checkpoint.version, found.checkpoint.finished) == (1, True)
