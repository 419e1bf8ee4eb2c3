"""Shared memory: the same bits as through Redis, the same promises, and what is lost when the memory is."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.faults import MortalServer
from helpers.harness import (
    abandoned,
    aggregating,
    await_version,
    check_chain,
    gradient,
    model,
    plain_loop,
    staleness_used,
    work,
    work_on,
)
from helpers.internals import abandon, segments_of
from helpers.servers import private_directory
from helpers.waiting import eventually
from kvps_aggregator import Aggregator, Outcome, serve

import kvps
from kvps.history.checkpoint import Checkpoint
from kvps.job import Job
from kvps.machine import process
from kvps.session.session import Session
from kvps.store import Store
from kvps.transport import shared_memory
from kvps.transport.shared_memory import Segments

PATIENT: dict[str, Any] = {"worker_timeout_ms": 60_000, "transport": "shm"}
LARGE = {"x": np.zeros(600_000, np.float32)}


def _folder(url: str) -> Path:
    return shared_memory.folder_of(url)


def _segments(job: Job, kind: str = "") -> list[str]:
    assert segments_of(job)
    return [name for name in segments_of(job).names() if name.startswith(kind)]


def _committed(job: Job, version: int) -> bool:
    return eventually(lambda: job.state().version == version)


def _bits(job: Job) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in job.snapshot()[1].items()}


# -- the same as through Redis -------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 3])
def test_bsp_equals_a_plain_loop_bit_for_bit(store: Store, workers: int) -> None:
    job = store.create_job("job", model(), workers=workers, optimizer=kvps.SGD(lr=0.05), **PATIENT)
    with aggregating(job):
        work(job, 30, lambda session, params, round_: gradient(params, session.rank, round_), workers)
        assert _committed(job, 30)
    assert check_chain(job) == 30
    assert staleness_used(job, workers) == 0
    for name, array in plain_loop(model(), workers, 30, 0.05).items():
        np.testing.assert_array_equal(job.snapshot()[1][name], array)


@pytest.mark.parametrize(
    ("optimizer", "gradient_format"),
    [
        (kvps.SGD(0.05, momentum=0.9), "fp32"),
        (kvps.Adam(0.05), "fp32"),
        (kvps.SGD(0.05), "int8"),
        (kvps.Adam(), "topk:0.1"),
    ],
)
def test_it_makes_no_difference_to_a_bit_how_arrays_move(store: Store, optimizer: Any, gradient_format: str) -> None:
    """With several chunks, which are made on several threads, and with optimizer state."""

    def quick(session: Session, params: dict[str, np.ndarray], round_: int) -> dict[str, np.ndarray]:
        return {name: (np.float32(0.1) * value + session.rank - round_) for name, value in params.items()}

    start = {"a": np.linspace(-1, 1, 1_200_000, dtype=np.float32), **model()}
    jobs = []
    for transport in ("redis", "shm"):
        settings = {**PATIENT, "transport": transport}
        job = store.create_job(
            transport, start, workers=2, optimizer=optimizer, gradient_format=gradient_format, **settings
        )
        assert job.config.transport == transport
        with aggregating(job):
            work(job, 6, quick, 2)
            assert _committed(job, 6)
        jobs.append(job)
    assert _bits(jobs[0]) == _bits(jobs[1])
    assert [c.plan.contributions[1].digests for c in jobs[0].log()] == [
        c.plan.contributions[1].digests for c in jobs[1].log()
    ]


@pytest.mark.parametrize("staleness", [2, -1])
def test_the_weights_are_exactly_the_sum_of_what_was_acknowledged(store: Store, staleness: int) -> None:
    ones = {"x": np.zeros(300_000, np.float32)}
    settings = {"workers": 3, "staleness": staleness, "reduction": "sum", "optimizer": kvps.SGD(lr=1.0)}
    job = store.create_job("job", ones, **settings, **PATIENT)
    with aggregating(job):
        work(job, 40, lambda session, params, round_: {"x": np.full(300_000, -1, np.float32)}, 3)
        assert eventually(lambda: sum(job.clock().values()) == 120)
    assert (job.snapshot()[1]["x"] == 120).all()


# -- without a copy ------------------------------------------------------------------------------------------------


def test_what_is_computed_into_the_buffers_is_pushed_as_it_lies_there(store: Store) -> None:
    job = store.create_job("job", LARGE, optimizer=kvps.SGD(lr=1.0), **PATIENT)
    with aggregating(job), job.join("w0") as session:
        for round_ in range(5):
            weights = session.pull()["x"]
            assert (weights == -sum(range(round_))).all()
            with pytest.raises(ValueError, match="read-only"):
                weights[0] = 1
            grads = session.buffers()
            grads["x"][:] = round_
            (name,) = _segments(job, f"g:w0.{session.incarnation}:{round_ + 1}")
            with segments_of(job).open(name, 2_400_000) as there:  # type: ignore[union-attr]
                assert (there.view(np.float32) == round_).all(), "it is there before it is pushed"
            session.push(grads)
            with pytest.raises(ValueError, match="read-only"):
                grads["x"][0] = 1  # it is a contribution now
        session.pull()
        assert len(_segments(job, "g:")) <= 2, "they are written anew"
    assert check_chain(job) == 5


def test_a_gradient_in_another_ones_buffer_is_refused_before_anything_is_written(store: Store) -> None:
    params = {name: np.zeros(300_000, np.float32) for name in "ab"}
    job = store.create_job("job", params, optimizer=kvps.SGD(lr=1.0), **PATIENT)
    with aggregating(job), job.join("w0") as session:
        session.pull()
        grads = session.buffers()
        grads["a"][:], grads["b"][:] = 1, 2
        with pytest.raises(kvps.LayoutMismatch, match="lies in another one's buffer"):
            session.push({"a": grads["b"], "b": grads["a"]})
        with pytest.raises(kvps.LayoutMismatch, match="lies in another one's buffer"):
            session.put("a", grads["b"])
        session.push(grads)
        weights = session.pull()
        assert (weights["a"] == -1).all()
        assert (weights["b"] == -2).all()


def test_over_redis_the_buffers_are_plain_arrays(store: Store) -> None:
    job = store.create_job("job", LARGE, optimizer=kvps.SGD(lr=1.0), transport="redis", worker_timeout_ms=60_000)
    with aggregating(job), job.join("w0") as session:
        for round_ in range(3):
            session.pull()
            grads = session.buffers()
            grads["x"][:] = round_
            session.put("x", grads["x"])
            session.push()
        assert (session.pull()["x"] == -3).all()


def test_pulled_weights_stay_as_they_are_however_many_versions_are_committed(store: Store) -> None:
    """Their memory is given to no other version while they are in use, also under ASP and by one who sleeps."""
    job = store.create_job("job", LARGE, workers=2, staleness=-1, optimizer=kvps.SGD(lr=1.0), **PATIENT)
    with aggregating(job), job.join("w0") as quick, job.join("w1") as slow:
        held = slow.pull()["x"]
        quick.pull()
        quick.push({"x": np.full(600_000, -1, np.float32)})
        held, at = slow.pull()["x"], slow.version
        before = held.copy()
        for _ in range(100):
            quick.pull()
            quick.push({"x": np.full(600_000, -1, np.float32)})
        assert eventually(lambda: job.state().version >= at + 50)
        assert held.tobytes() == before.tobytes()
        assert slow.pull()["x"][0] >= 25


def test_weights_outlive_their_session(store: Store) -> None:
    """Whoever still has an array of them keeps all of them as they were."""
    job = store.create_job("job", LARGE, workers=2, staleness=-1, optimizer=kvps.SGD(lr=1.0), **PATIENT)
    with aggregating(job), job.join("w0") as quick:
        with job.join("w1") as gone:
            quick.pull()
            quick.push({"x": np.full(600_000, -1, np.float32)})
            assert _committed(job, 1)
            kept, at = gone.pull()["x"][10:20], gone.version
        del gone
        for _ in range(50):
            quick.pull()
            quick.push({"x": np.full(600_000, -1, np.float32)})
        assert eventually(lambda: job.state().version > at + 20)
        assert (kept == 0.5).all()


# -- whoever is killed ---------------------------------------------------------------------------------------------


def _serve(store: Store) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "kvps", "aggregator", "start", "--job", "job"],
        env=os.environ | {"KVPS_REDIS_URL": store.url},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_a_standby_goes_on_in_the_memory_of_a_killed_holder(store: Store) -> None:
    """Nothing is rolled back though Redis was never given anything but version 0."""
    job = store.create_job("job", model(), optimizer=kvps.Adam(0.05), lease_ms=300, mirror_every="1000000", **PATIENT)
    processes = [_serve(store), _serve(store)]
    try:
        worker = threading.Thread(target=work_on, args=(job, "w0", 90))
        worker.start()
        for _ in range(2):
            before = job.state().version
            assert eventually(lambda b=before: job.state().version >= b + 15)
            holder = int(job.holders()[0].split(":")[1])
            os.kill(holder, signal.SIGKILL)
            assert eventually(lambda h=holder: str(h) not in job.holders()[0])
            if len(processes) < 3:
                processes.append(_serve(store))
        worker.join()
        assert _committed(job, 90)
    finally:
        for each in processes:
            each.kill()
            each.wait()
    assert check_chain(job) == 90
    assert job.state().history == job.state().id, "nobody began a new history"
    assert len({shard.split()[0] for commit in job.log() for shard in commit.shards}) == 3


def test_a_finished_job_leaves_no_segment_of_the_holder_before_the_last(store: Store) -> None:
    """Nor of a version that Redis was given by that one, and has when the job ends."""
    job = store.create_job("job", model(), mirror_every="1000000", lease_ms=300, **PATIENT)
    assert segments_of(job)
    with job.join("w0") as session:
        with abandoned(job) as aggregator:
            for round_ in range(6):
                session.push(gradient(session.pull(), 0, round_))
                assert aggregator.work() is Outcome.COMMITTED
                if round_ == 1:
                    aggregator.held.flush()
            assert job.kept(99) == 2
        successor = threading.Thread(target=serve, args=(job,))
        successor.start()
        for round_ in range(6, 8):
            session.push(gradient(session.pull(), 0, round_))
        assert _committed(job, 8)
    successor.join()
    assert job.kept(99) == 8
    assert segments_of(job).names() == []


@pytest.mark.parametrize("staleness", [0, 2, -1])
def test_lost_memory_takes_back_what_came_since_redis_was_given_it_and_no_more(store: Store, staleness: int) -> None:
    """As if the host had gone down: every process is gone, and all that was in memory. Redis is all there is."""
    config = {"workers": 2, "staleness": staleness, "optimizer": kvps.SGD(lr=0.05, momentum=0.9)}
    job = store.create_job("job", model(), mirror_every="10", lease_ms=300, **config, **PATIENT)
    with abandoned(job) as aggregator:
        sessions = [job.join(f"w{i}") for i in range(2)]
        for _ in range(17):
            for session in sessions:
                session.push(gradient(session.pull(), session.rank, session.round))
            while aggregator.work() is Outcome.COMMITTED:
                pass
        assert eventually(lambda: job.kept(99) >= 10)
    kept, before = job.kept(99), job.state()
    assert 10 <= kept <= before.version
    assert segments_of(job)
    shared_memory.forget(segments_of(job).folder)
    with pytest.raises(kvps.UsageError, match="does not see"):
        job.join("w0")
    with aggregating(job):
        assert eventually(lambda: job.state().history != before.history)
        state = job.state()
        assert (state.version, sum(state.clock.values())) == (kept, sum(job.clock().values()))
        with pytest.raises(kvps.WorkerEvicted):
            sessions[0].pull()
        with ThreadPoolExecutor(2) as pool:
            for done in [pool.submit(work_on, job, f"w{i}", 25) for i in range(2)]:
                done.result()
        assert eventually(lambda: sum(job.clock().values()) == 50)
    check_chain(job)
    (entry,) = [f for _, f in job.entries() if f["kind"] == "recover"]
    assert (int(entry["version"]), int(entry["lost"])) == (kept, before.version - kept)
    rounds = [(c.worker, c.round) for commit in job.log() for c in commit.plan.contributions]
    assert sorted(rounds) == sorted((f"w{i}", r) for i in range(2) for r in range(1, 26)), "each counts once"
    if staleness == 0:
        whole = store.create_job("whole", model(), **config, transport="redis", worker_timeout_ms=60_000)
        with aggregating(whole):
            work(whole, 25, lambda session, params, round_: gradient(params, session.rank, round_), 2)
            assert _committed(whole, 25)
        assert _bits(job) == _bits(whole)


def test_each_loss_stays_in_the_log_though_the_next_goes_further_back(store: Store) -> None:
    """Memory is lost again before Redis was given anything since."""
    job = store.create_job("job", model(), mirror_every="1000000", lease_ms=300, **PATIENT)
    assert segments_of(job)
    for rounds in (3, 2, 0):
        with abandoned(job) as aggregator:
            assert eventually(lambda a=aggregator: a.hold(at_once=True) or bool(a.held.shards))
            session = job.join("w0") if rounds else None
            for round_ in range(rounds):
                session.push(gradient(session.pull(), 0, round_))  # type: ignore[union-attr]
                while aggregator.work() is Outcome.COMMITTED:
                    pass
        shared_memory.forget(segments_of(job).folder)
    assert [(f["version"], f["lost"]) for _, f in job.entries() if f["kind"] == "recover"] == [("0", "3"), ("0", "2")]
    assert check_chain(job) == 0


def test_memory_that_is_lost_under_a_living_holder_is_taken_anew(store: Store) -> None:
    """As when a user's last login ends, and systemd removes what is his in /dev/shm: the job was not removed."""
    job = store.create_job("job", model(), mirror_every="1000000", lease_ms=300, **PATIENT)
    assert segments_of(job)
    with abandoned(job) as aggregator, job.join("w0") as session:
        for round_ in range(3):
            session.push(gradient(session.pull(), 0, round_))
            while round_ < 2 and aggregator.work() is Outcome.COMMITTED:
                pass
        shared_memory.forget(segments_of(job).folder)
        aggregator.work()
        assert eventually(lambda: aggregator.hold(at_once=True) or bool(aggregator.held.shards))
        with pytest.raises(kvps.WorkerEvicted):
            session.pull()
        abandon(session)
        again = job.join("w0")
        again.push(gradient(again.pull(), 0, 0))
        assert aggregator.work() is Outcome.COMMITTED
    assert [(f["version"], f["lost"]) for _, f in job.entries() if f["kind"] == "recover"] == [("0", "2")]
    assert check_chain(job) == 1


def test_what_a_rollback_loses_is_said_as_the_log_says_it(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    """The holder's own count differs after a lost reply, or when the server has forgotten a version; so may the call be
    made twice."""
    job = store.create_job("job", model(), mirror_every="1000000", lease_ms=300, **PATIENT)
    assert segments_of(job)
    with abandoned(job) as aggregator, job.join("w0") as session:
        for round_ in range(2):
            session.push(gradient(session.pull(), 0, round_))
            assert aggregator.work() is Outcome.COMMITTED
        shard = aggregator.held.shards[0]
        shard.version += 1
        with pytest.raises(kvps.LeaseLost):
            shard.storage._roll_back()
        assert job.access.scripts.rollback(shard.term, job.state().history, job.config.memory) == (0, 2), "asked again"
        abandon(session)
    assert [(f["version"], f["lost"]) for _, f in job.entries() if f["kind"] == "recover"] == [("0", "2")]
    assert "goes on from version 0, which Redis has; the last 2 versions are lost" in caplog.text


def test_a_holder_that_has_nothing_to_do_notices_too_that_the_memory_is_lost(store: Store) -> None:
    """Or nobody could join, and so nobody would give it anything to do."""
    job = store.create_job("job", model(), mirror_every="1000000", lease_ms=300, **PATIENT)
    assert segments_of(job)
    with aggregating(job):
        with job.join("w0") as session:
            for round_ in range(3):
                session.push(gradient(session.pull(), 0, round_))
            assert _committed(job, 3)
            shared_memory.forget(segments_of(job).folder)
            assert eventually(lambda: job.state().version == 0)
            abandon(session)
        work_on(job, "w0", 4)
        assert _committed(job, 4)
    assert check_chain(job) == 4


@pytest.mark.slow
def test_a_server_that_lost_its_last_writes_goes_on_from_what_it_was_given() -> None:
    """Its inbox waits for contributions whose memory has been written anew since."""
    settings = {**PATIENT, "lease_ms": 300, "mirror_every": "5", "optimizer": kvps.SGD(lr=0.05)}
    with (
        private_directory() as folder,
        MortalServer(folder) as server,
        kvps.connect(server.url) as store,
    ):
        job = store.create_job("job", model(), **settings)
        with aggregating(job):
            worker = threading.Thread(target=work_on, args=(job, "w0", 200))
            worker.start()
            assert eventually(lambda: job.state().version > 60)
            server.kill()
            whole = server.log().read_bytes()
            server.log().write_bytes(whole[: int(len(whole) * 0.7)])
            server.start()
            worker.join()
            assert _committed(job, 200)
        check_chain(job)
        assert [f for _, f in job.entries() if f["kind"] == "recover"]
        for name, array in plain_loop(model(), 1, 200, 0.05).items():
            np.testing.assert_array_equal(job.snapshot()[1][name], array)
        store.remove_job("job")


def test_a_contribution_whose_memory_was_written_anew_is_done_again_and_not_rejected(store: Store) -> None:
    """A server that forgot a commit waits for what its worker has seen committed, and written over since."""
    job = store.create_job("job", model(), mirror_every="1000000", optimizer=kvps.SGD(lr=0.05), **PATIENT)
    assert segments_of(job)
    with abandoned(job) as aggregator, job.join("w0") as session:
        session.push(gradient(session.pull(), 0, 0))
        while aggregator.work() is Outcome.COMMITTED:
            pass
        session.push(gradient(session.pull(), 0, 1))
        segments_of(job).unlink([f"g:w0.{session.incarnation}:2"])
        aggregator.work()
        assert job.state().version == 0
        with pytest.raises(kvps.WorkerEvicted):
            session.pull()
        abandon(session)
    with aggregating(job):
        work_on(job, "w0", 5)
        assert _committed(job, 5)
    assert not [f for _, f in job.entries() if f["kind"] == "reject"]
    assert check_chain(job) == 5
    for name, array in plain_loop(model(), 1, 5, 0.05).items():
        np.testing.assert_array_equal(job.snapshot()[1][name], array)


def test_memory_that_is_deleted_under_a_living_job_is_made_anew(store: Store) -> None:
    """As some systems do when their user logs out."""
    job = store.create_job("job", model(), mirror_every="5", lease_ms=300, optimizer=kvps.SGD(lr=0.05), **PATIENT)
    assert segments_of(job)
    with aggregating(job):
        worker = threading.Thread(target=_work_on_whatever_happens, args=(job, 60))
        worker.start()
        assert eventually(lambda: job.kept(99) >= 10)
        shared_memory.forget(segments_of(job).folder)
        worker.join()
        assert _committed(job, 60)
    assert check_chain(job) == 60
    for name, array in plain_loop(model(), 1, 60, 0.05).items():
        np.testing.assert_array_equal(job.snapshot()[1][name], array)


def _work_on_whatever_happens(job: Job, rounds: int) -> None:
    while job.state().version < rounds:
        with contextlib.suppress(kvps.UsageError):  # there is no memory until the aggregator has it made
            work_on(job, "w0", rounds)


def test_a_full_memory_is_said_and_waited_for(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    job = store.create_job("job", model(), lease_ms=60_000, optimizer=kvps.SGD(lr=0.01), **PATIENT)
    full = threading.Event()
    real = os.posix_fallocate

    def fallocate(*arguments: int) -> None:
        if full.is_set():
            raise OSError(errno.ENOSPC, "full")
        real(*arguments)

    monkeypatch.setattr(os, "posix_fallocate", fallocate)
    aggregator = Aggregator(job, threading.Event())
    aggregator.hold()
    with job.join("w0") as session:
        params = session.pull()
        full.set()
        with pytest.raises(kvps.ServerFull, match=r"/dev/shm is full .* --transport redis"):
            session.push(gradient(params, 0, 0))
        full.clear()
        assert session.push(gradient(params, 0, 0)) == 1
        full.set()
        assert aggregator.work() is Outcome.WORKED
        assert job.state().version == 0
        full.clear()
        assert aggregator.work() is Outcome.COMMITTED
        assert session.pull()
    aggregator.release()
    for name, array in plain_loop(model(), 1, 1, 0.01).items():
        np.testing.assert_array_equal(job.snapshot()[1][name], array)


# -- the mirror ----------------------------------------------------------------------------------------------------


@pytest.fixture
def elsewhere(store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The job as another host sees it: the same Redis, another memory."""

    def see(name: str) -> Job:
        with monkeypatch.context() as there:
            there.setattr(shared_memory, "ROOT", tmp_path)
            return store.job(name)

    return see


def test_others_see_what_redis_was_given(store: Store, elsewhere: Any) -> None:
    job = store.create_job("job", model(), optimizer=kvps.Adam(0.05), mirror_every="4", **PATIENT)
    other = elsewhere("job")
    assert other.snapshot()[0] == 0
    with aggregating(job), job.join("w0") as session:
        weights = {}
        for round_ in range(10):
            weights[round_] = {name: array.tobytes() for name, array in session.pull().items()}
            if round_ < 9:
                session.push(gradient(session.pull(), 0, round_))
        assert eventually(lambda: job.kept(99) > 9 - 4)
        version, seen = other.snapshot()
        assert {name: array.tobytes() for name, array in seen.items()} == weights[version]
        assert version > 9 - 4
        assert job.snapshot()[0] == 9
        with pytest.raises(kvps.UsageError, match=f"shared memory of {process.host()}.*--transport redis"):
            other.join("w1")
        with pytest.raises(kvps.UsageError):
            other.join("w1", takeover=True)
    # An aggregator that ends leaves all in Redis.
    assert other.snapshot()[0] == 9
    assert _bits(other) == _bits(job)


def test_what_was_given_in_vain_is_deleted_and_what_was_given_stays(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis refuses each version twice, in the middle, and takes it then."""
    job = store.create_job("job", model(), mirror_every="1000000", lease_ms=60_000, **PATIENT)
    aggregator = Aggregator(job, threading.Event())
    aggregator.hold()
    (shard,) = aggregator.held.shards.values()
    put = job.access.client.put
    with job.join("w0") as session:
        for round_ in range(3):
            session.push(gradient(session.pull(), 0, round_))
            while aggregator.work() is Outcome.COMMITTED:
                pass
            for _ in range(2):
                monkeypatch.setattr(job.access.client, "put", lambda items, **_: [put(items[:1]), _full()])
                with pytest.raises(kvps.ServerFull):
                    shard.storage.flush()
            monkeypatch.setattr(job.access.client, "put", put)
            shard.storage.flush()
            shard.storage.flush()
            assert job.kept(99) == round_ + 1
            state, weights = job.state(), np.empty(job.layout.size, np.float32)
            given = {key.split(":")[3] for key in store.client.scan(job.access.keys.all_bytes) if ":w:" in key}
            assert state.names[0] in given
            assert len(given) <= 2
            again = job.access.reader.given(state)
            assert again is not None
            job.access.reader.fetch(state, weights)
            assert again.tobytes() == weights.tobytes()
    aggregator.release()


def _full() -> None:
    raise kvps.ServerFull("full")


def test_a_mirror_that_knows_more_than_the_server_gives_up_for_now(store: Store) -> None:
    job = store.create_job("job", model(), mirror_every="1000000", **PATIENT)
    aggregator = Aggregator(job, threading.Event())
    aggregator.hold()
    (shard,) = aggregator.held.shards.values()
    shard.storage._mirror.lets_go(7, "7.anybodys")
    shard.storage._mirror._mirrored = -1
    with pytest.raises(kvps.KvpsError, match="earlier version"):
        shard.storage.flush()
    aggregator.release()


def test_who_sleeps_while_it_finishes_deletes_nothing_of_others(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    job = store.create_job("job", model(), lease_ms=60_000, **PATIENT)
    first = Aggregator(job, threading.Event())
    first.hold()
    (shard,) = first.held.shards.values()
    with job.join("w0") as session:
        session.push(gradient(session.pull(), 0, 0))
        while first.work() is Outcome.COMMITTED:
            pass
        monkeypatch.setattr(shard.storage, "close", lambda: None)
        first.held.leases.give_up(0)
        second = Aggregator(job, threading.Event())
        second.hold()
        for round_ in (1, 2):
            session.push(gradient(session.pull(), 0, round_))
            with contextlib.suppress(kvps.LeaseLost):
                shard.storage.finish()
            while second.work() is Outcome.COMMITTED:
                pass
        assert job.state().version == 3
    assert check_chain(job) == 3
    monkeypatch.undo()
    shard.storage.close()
    for each in (first, second):
        each.release()


def test_by_time_the_last_version_gets_there_too(store: Store) -> None:
    """Also when nothing is committed any more: what is not yet due is given when it is."""
    job = store.create_job("job", model(), mirror_every="0.2s", **PATIENT)
    with aggregating(job), job.join("w0") as session:
        for round_ in range(20):
            session.push(gradient(session.pull(), 0, round_))
        assert _committed(job, 20)
        assert eventually(lambda: job.kept(99) == 20)

        def names() -> set[str]:
            return {key.split(":")[3] for key in store.client.scan(job.access.keys.all_bytes) if ":w:" in key}

        assert eventually(lambda: len(names()) <= 2), "older ones are deleted"
        assert job.state().names[0] in names()


# -- checkpoints, proofs -------------------------------------------------------------------------------------------


def test_a_checkpoint_is_made_of_memory_and_restored_anywhere(store: Store, tmp_path: Path) -> None:
    settings = {"workers": 1, "optimizer": kvps.Adam(0.05)}
    whole = store.create_job("whole", model(), **settings, **PATIENT)
    with aggregating(whole):
        work(whole, 12, lambda session, params, round_: gradient(params, session.rank, round_), 1)
        assert _committed(whole, 12)
    job = store.create_job("job", model(), mirror_every="1000000", **settings, **PATIENT)
    with aggregating(job):
        session = job.join("w0")
        for _ in range(7):
            session.push(gradient(session.pull(), 0, session.round))
        assert _committed(job, 7)
        path = tmp_path / "c.safetensors"
        job.checkpoint().write(path)
        session.leave(finished=False)
    for name, shards in (("again", None), ("shards", 2)):
        restored = store.restore_job(Checkpoint.load(path), name, shards)
        assert restored.config.transport == "redis", "it is small"
        with aggregating(restored), restored.join("w0") as session:
            while session.round < 12:
                session.push(gradient(session.pull(), 0, session.round))
            assert _committed(restored, 12)
        assert _bits(restored) == _bits(whole)


# -- which, and for how long ---------------------------------------------------------------------------------------


def test_auto_is_shared_memory_where_that_is_sure_and_worth_it(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(params: Any = LARGE, **settings: Any) -> str:
        job = store.create_job("job", params, **settings)
        store.remove_job("job")
        return job.config.transport

    assert chosen() == "shm"
    assert chosen(model()) == "redis"
    assert chosen(shards=2) == "redis"
    assert chosen(weight_format="bf16") == "redis"
    assert chosen(transport="redis") == "redis"
    assert chosen(model(), transport="shm") == "shm"
    monkeypatch.setattr(store.client, "port", lambda: 6379)
    assert chosen() == "redis", "others may come over TCP"
    monkeypatch.undo()
    monkeypatch.setattr(shared_memory, "free_bytes", lambda: 20_000_000)
    assert chosen() == "redis"
    with pytest.raises(kvps.ServerFull, match=r"has 20\.0 MB left, the job needs .* MB"):
        chosen({"x": np.zeros(3_000_000, np.float32)}, transport="shm")
    monkeypatch.setattr(shared_memory, "ROOT", Path("/nowhere"))
    assert chosen() == "redis"
    with pytest.raises(kvps.InvalidSetting, match="needs /nowhere"):
        chosen(transport="shm")


@pytest.mark.parametrize(
    "settings",
    [
        *({"mirror_every": every} for every in ("0", "-1s", "1m", "0.0s", "")),
        *({"transport": "shm"} | more for more in ({"shards": 2}, {"weight_format": "bf16"})),
        {"transport": "rdma"},
    ],
)
def test_bad_settings_are_one_line_and_change_nothing(store: Store, settings: dict[str, Any]) -> None:
    with pytest.raises(kvps.InvalidSetting) as refused:
        store.create_job("job", LARGE, **settings)
    assert "\n" not in str(refused.value)
    assert store.jobs() == []


def test_a_finished_or_removed_job_leaves_no_memory(store: Store) -> None:
    for ends in ("finished", "removed"):
        job = store.create_job("job", LARGE, **PATIENT)
        with aggregating(job) if ends == "removed" else _finishing(job):
            with job.join("w0") as session:
                for _ in range(3):
                    session.pull()
                    session.push({"x": np.ones(600_000, np.float32)})
                assert _committed(job, 3)
            if ends == "removed":
                store.remove_job("job")
        if ends == "finished":
            assert _segments(job) == []
            assert (job.snapshot()[1]["x"] < 0).all(), "it is all in Redis"
            store.remove_job("job")
        assert segments_of(job)
        assert not segments_of(job).folder.exists()


class _finishing:  # noqa: N801
    """An aggregator that ends with the job."""

    def __init__(self, job: Job) -> None:
        self._thread = threading.Thread(target=Aggregator(job, threading.Event()).run, args=(True,))

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._thread.join()


def test_segments_of_the_dead_are_swept_and_those_of_the_living_are_not(store: Store) -> None:
    job = store.create_job("job", model(), workers=2, staleness=2, **PATIENT)
    assert segments_of(job)
    aggregator = Aggregator(job, threading.Event())
    aggregator.hold()
    dead, alive = job.join("w0"), job.join("w1")
    for session in (dead, alive):
        session.push(gradient(session.pull(), session.rank, 0))
    alive.pull()
    alive.buffers()
    segments_of(job).make(f"g:w0.{dead.incarnation}:2", 64)  # never accepted
    segments_of(job).make("w:1.old-1-abcdabcd", 64)  # staged by a holder that was replaced
    again = job.join("w0", takeover=True)
    aggregator.sweep()
    left = {f"g:w0.{dead.incarnation}:1", f"g:w1.{alive.incarnation}:1", f"g:w1.{alive.incarnation}:2"}
    assert {name for name in _segments(job) if not name.startswith("opt")} == left
    while aggregator.work() is Outcome.COMMITTED:
        pass
    aggregator.sweep()
    assert f"g:w0.{dead.incarnation}:1" not in _segments(job)
    assert job.clock() == {"w0": 1, "w1": 1}
    for session in (again, alive):
        session.leave()
    aggregator.release()


@pytest.mark.slow
@pytest.mark.parametrize("lasting", [False, True])
def test_what_a_server_that_keeps_nothing_had_in_memory_ends_with_it(home: Path, lasting: bool) -> None:
    code = (
        "import sys, numpy, kvps; s = kvps.connect(); "
        "j = s.create_job('job', {'x': numpy.zeros(400_000, 'f4')}); print(s.url, j.config.transport, flush=True); "
        "sys.stdin.read()"
    )
    if lasting:
        subprocess.run([sys.executable, "-m", "kvps", "server", "start"], check=True, capture_output=True)
    user = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert user.stdout
    url, transport = user.stdout.readline().split()
    assert transport == "shm"
    assert list(_folder(url).iterdir())
    user.kill()
    user.communicate()
    if lasting:
        assert _folder(url).exists()
        subprocess.run([sys.executable, "-m", "kvps", "server", "stop"], check=True, capture_output=True)
    assert eventually(lambda: not _folder(url).exists())


# -- segments themselves -------------------------------------------------------------------------------------------


@pytest.fixture
def segments() -> Iterator[Segments]:
    found = Segments(shared_memory.memory_of("unix:///tests"), os.urandom(4).hex())
    found.ensure()
    yield found
    found.remove()
    assert not found.folder.exists()


def test_a_segment_is_not_written_anew_while_it_is_read(segments: Segments) -> None:
    made = segments.make("a", 100)
    made.data[:] = 7
    with segments.open("a", 100) as first, segments.open("a", 100):
        assert not made.renamed("b")
        assert (first == 7).all()
    other = Segments(shared_memory.memory_of("unix:///tests"), segments.folder.name)  # as another process has it
    with other.open("a", 100):
        assert segments.make("b", 100, [made]) is not made
    assert segments.make("c", 100, [made]) is made
    assert segments.names() == ["b", "c"]
    with pytest.raises(shared_memory.ChunkGone, match="segment a is gone"):
        segments.open("a", 100)
    with pytest.raises(shared_memory.ChunkGone, match="has 100 bytes, not 99"):
        segments.open("c", 99)
    with segments.open("c", 100) as held:
        segments.unlink(["c", "never"])
        assert not made.renamed("d"), "it was swept"
        made.data[:] = 9
        assert (held == 9).all(), "who has it open keeps it"


@pytest.mark.slow
def test_a_reader_that_comes_while_a_segment_is_renamed_has_the_one_or_none(segments: Segments) -> None:
    """Each file is filled with the number in its name; a maker renames and fills it as fast as it can."""
    made, over = segments.make("0", 4096), threading.Event()
    newest = [0]
    made.data[:] = 0

    def write() -> None:
        number = 0
        while not over.is_set():
            if made.renamed(f"{number + 1}"):
                number += 1
                made.data[:] = number % 251
                newest[0] = number

    writer = threading.Thread(target=write)
    writer.start()
    seen, gone = 0, 0
    while seen < 300:
        number = newest[0]
        try:
            with segments.open(f"{number}", 4096) as data:
                assert (data == number % 251).all()
                seen += 1
        except shared_memory.ChunkGone:
            gone += 1
    over.set()
    writer.join()
    print(f"{seen} read, {gone} gone, {newest[0]} written")


def test_a_forked_child_gives_no_lock_of_its_parent_back(segments: Segments) -> None:
    made = segments.make("a", 100)
    with segments.open("a", 100):
        child = os.fork()
        if not child:
            for file in segments._files.values():
                file.leave()
            os._exit(0)
        os.waitpid(child, 0)
        assert not made.renamed("b")


def test_a_maker_that_sleeps_with_the_lock_holds_nobody_up(segments: Segments) -> None:
    made = segments.make("a", 100)
    fcntl.flock(made._fd, fcntl.LOCK_EX)
    with pytest.raises(shared_memory.ChunkGone):
        segments.open("a", 100)


def test_another_users_directory_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shared_memory, "ROOT", tmp_path)
    (tmp_path / f"kvps-{os.getuid()}").mkdir(mode=0o755)
    os.chmod(tmp_path / f"kvps-{os.getuid()}", 0o755)
    with pytest.raises(kvps.ServerUnfit, match="mode 0700"):
        Segments(shared_memory.memory_of("unix:///tests"), "abcdabcd").ensure()


_OTHERS = f"vm/0/{'0' * 16}/{'0' * 32}//1.1\n"


def test_what_redis_says_leads_nowhere_else(store: Store) -> None:
    job = store.create_job("job", model(), **PATIENT)
    folder = segments_of(job).folder  # type: ignore[union-attr]
    for evil in (
        "vm/0/../../../tmp",
        "vm/0/",
        "vm/0123456789abcdef",
        "vm/0/0123456789abcdef/../../1.1",
        _OTHERS,
        f"../{_OTHERS}",
    ):
        store.client.call("HSET", job.access.keys.config, "memory", evil)
        with pytest.raises(kvps.CorruptData, match="another program"):
            store.job("job")
    store.remove_job("job")
    shutil.rmtree(folder.parent)


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Path]:
    """A directory of another user, in which there is nothing before and after a test."""
    if os.geteuid():
        pytest.skip("only root can make a directory of another user")
    path = tmp_path / "outside"
    path.mkdir(mode=0o700)
    os.chown(path, 65534, 65534)
    yield path
    assert list(path.rglob("*")) == []


def _stand_in(place: Path, how: str, outside: Path) -> None:
    """Put what another user could have put there in the place of one of kvps's directories."""
    away = place.with_name("away")
    place.rename(away)
    if how == "a link to another's":
        place.symlink_to(outside)
    elif how == "a link to the same":
        place.symlink_to(away)
    else:
        shutil.copytree(away, place)
        os.chmod(place, 0o700 if how == "another's" else 0o777)
        os.chown(place, 65534 if how == "another's" else 0, 0)


@pytest.mark.parametrize("level", [0, *(pytest.param(level, marks=pytest.mark.slow) for level in (1, 2))])
@pytest.mark.parametrize("how", ["a link to another's", "a link to the same", "another's", "open to others"])
def test_nothing_is_made_or_mapped_where_others_may_write(
    store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, outside: Path, how: str, level: int
) -> None:
    """At each level of the directory: who owns a file can cut it, and so end all who have it mapped."""
    monkeypatch.setattr(shared_memory, "ROOT", tmp_path)
    job = store.create_job("job", model(), **PATIENT)
    folder = segments_of(job).folder  # type: ignore[union-attr]
    with aggregating(job):
        work_on(job, "w0", 1)
        await_version(job, 1)
    _stand_in([folder, folder.parent, folder.parent.parent][level], how, outside)
    files = sorted(tmp_path.rglob("*"))
    again = store.job("job")
    segments = segments_of(again)
    assert segments
    assert not segments.here
    assert not segments.seen
    assert segments.names() == []
    with pytest.raises(kvps.ServerUnfit, match="must be yours with mode 0700"):
        again.join("w0")
    with pytest.raises((kvps.ServerUnfit, kvps.KvpsError)):
        segments.make("g:w0.1-a:1", 100)
    with pytest.raises((kvps.ServerUnfit, shared_memory.ChunkGone)):
        segments.open("identity", 32)
    aggregator = Aggregator(again, threading.Event())
    aggregator.hold(at_once=True)
    assert not aggregator.held.shards
    store.remove_job("job")
    assert sorted(tmp_path.rglob("*")) == files, "nothing is deleted there either"


@pytest.mark.parametrize("kind", ["a link", "another's", "a pipe", "a directory", "cut"])
def test_only_files_of_this_user_are_mapped(segments: Segments, tmp_path: Path, kind: str) -> None:
    path = segments.folder / "a"
    segments.make("b", 100)
    if kind == "a link":
        path.symlink_to("b")
    elif kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a directory":
        path.mkdir()
    elif kind == "cut":
        path.write_bytes(b"x")
    else:
        if os.geteuid():
            pytest.skip("only root can make a file of another user")
        path.write_bytes(bytes(100))
        os.chown(path, 65534, 65534)
    with pytest.raises(
        shared_memory.ChunkGone if kind == "cut" else kvps.ServerUnfit, match=r"segment a|a file of yours|a cannot"
    ):
        segments.open("a", 100)


def test_auto_goes_through_redis_where_others_may_write(
    store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shared_memory, "ROOT", tmp_path)
    (tmp_path / f"kvps-{os.getuid()}").mkdir()
    os.chmod(tmp_path / f"kvps-{os.getuid()}", 0o777)
    assert store.create_job("job", {"x": np.zeros(600_000, np.float32)}).config.transport == "redis"
    assert "must be a directory of yours with mode 0700" in caplog.text
    with pytest.raises(kvps.ServerUnfit, match="must be a directory of yours"):
        store.create_job("other", model(), **PATIENT)


# -- on the command line -------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_up_over_shared_memory_under_fire_is_replayed(home: Path) -> None:
    command = [sys.executable, "-m", "kvps", "up", "digits", "--transport", "shm", "--mirror-every", "0.1s"]
    done = subprocess.run([*command, "--kill-every", "0.8", "--epochs", "20"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ", 0 lost, 0 twice, replay identical" in done.stdout
    refused = subprocess.run([*command, "--shards", "2"], capture_output=True, text=True)
    assert refused.returncode == 2
    assert refused.stderr.splitlines()[-1].startswith("kvps: error: transport shm is for shards=1")


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_status_says_where_the_arrays_are(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.create_job("job", model(), **PATIENT)
    command = [sys.executable, "-m", "kvps", "status", "job", "--redis", store.url]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert f"arrays in the shared memory of {process.host()}; Redis has version 0" in said
