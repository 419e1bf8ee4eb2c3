"""Shared memory that is lost, full or left by the dead: what a job goes on from, and what it says."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from helpers.arrays import assert_same_bits
from helpers.harness import abandoned, aggregating, check_chain, gradient, log_entries, model, plain_loop, work, work_on
from helpers.internals import abandon, segments_of
from helpers.shared_memory import OVER_SHM, bits, commit_all, committed, recoveries, take, train
from helpers.waiting import eventually
from kvps_aggregator import Aggregator, Outcome, serve
from kvps_aggregator.checkpoints import KeptLog

import kvps
from kvps.store import Store
from kvps.transport import shared_memory

pytestmark = pytest.mark.usefixtures("seldom_mirrored")


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
    """Nothing is rolled back though Redis has an older version."""
    job = store.create_job("job", model(), optimizer=kvps.Adam(0.05), lease_ms=300, **OVER_SHM)
    processes = [_serve(store), _serve(store)]
    try:
        worker = threading.Thread(target=work_on, args=(job, "w0", 90))
        worker.start()
        for _ in range(2):
            before = job.state().version
            assert eventually(lambda b=before: job.state().version >= b + 15)
            holder = int(job.access.reader.holders()[0].split(":")[1])
            os.kill(holder, signal.SIGKILL)
            assert eventually(lambda h=holder: str(h) not in job.access.reader.holders()[0])
            if len(processes) < 3:
                processes.append(_serve(store))
        worker.join()
        assert committed(job, 90)
    finally:
        for each in processes:
            each.kill()
            each.wait()
    assert check_chain(job) == 90
    assert job.state().history == job.state().id, "nobody began a new history"
    assert len({shard.split()[0] for commit in job.log() for shard in commit.shards}) == 3


def test_a_finished_job_leaves_no_segment_of_the_holder_before_the_last(store: Store) -> None:
    """Nor of a version that Redis was given by that one, and has when the job ends. Nothing is rolled back, though
    Redis has an older version when the holder dies."""
    job = store.create_job("job", model(), lease_ms=300, **OVER_SHM)
    assert segments_of(job)
    with job.join("w0") as session:
        with abandoned(job) as aggregator:
            train(session, aggregator, 2)
            aggregator.held.flush()
            train(session, aggregator, 4)
            assert job.access.transport.safe_version(99) == 2
        successor = threading.Thread(target=serve, args=(job,))
        successor.start()
        for round_ in range(6, 8):
            session.push(gradient(session.pull(), 0, round_))
        assert committed(job, 8)
    successor.join()
    assert job.access.transport.safe_version(99) == 8, "it is all in Redis"
    assert job.state().history == job.state().id, "nobody began a new history"
    assert segments_of(job).names() == []
    store.remove_job("job")
    assert not segments_of(job).folder.exists()


@pytest.mark.parametrize("staleness", [0, -1])
def test_lost_memory_takes_back_what_came_since_redis_was_given_it_and_no_more(
    store: Store, staleness: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the host had gone down: every process is gone, and all that was in memory. Redis is all there is."""
    config = {"workers": 2, "staleness": staleness, "optimizer": kvps.SGD(lr=0.05, momentum=0.9)}
    job = store.create_job("job", model(), lease_ms=300, **config, **OVER_SHM)
    with abandoned(job) as aggregator:
        sessions = [job.join(f"w{i}") for i in range(2)]
        for number in range(17):
            for session in sessions:
                session.state = {"done": session.clock + 1}
                session.push(gradient(session.pull(), session.rank, session.round))
            commit_all(aggregator)
            if number == 9:
                aggregator.held.flush()
    kept, before = job.access.transport.safe_version(99), job.state()
    assert 10 <= kept <= before.version
    assert segments_of(job)
    shared_memory.forget(segments_of(job).folder)
    monkeypatch.setenv("KVPS_PATIENCE", "0.2")
    with kvps.connect(store.url) as hasty, pytest.raises(kvps.UsageError, match=r"for 0.2 s no aggregator has begun"):
        hasty.job("job").join("w0")
    with aggregating(job):
        assert eventually(lambda: job.state().history != before.history)
        state = job.state()
        assert (state.version, sum(state.clock.values())) == (kept, sum(job.state().clock.values()))
        assert job.states() == {worker: {"done": clock} for worker, clock in state.clock.items()}
        with pytest.raises(kvps.WorkerEvicted):
            sessions[0].pull()
        with ThreadPoolExecutor(2) as pool:
            for done in [pool.submit(work_on, job, f"w{i}", 25) for i in range(2)]:
                done.result()
        assert eventually(lambda: sum(job.state().clock.values()) == 50)
    check_chain(job)
    assert recoveries(job) == [(f"{kept}", f"{before.version - kept}")]
    rounds = [(c.worker, c.round) for commit in job.log() for c in commit.plan.contributions]
    assert sorted(rounds) == sorted((f"w{i}", r) for i in range(2) for r in range(1, 26)), "each counts once"
    if staleness == 0:
        whole = store.create_job("whole", model(), **config, transport="redis", worker_timeout_ms=60_000)
        with aggregating(whole):
            work(whole, 25, lambda session, params, round_: gradient(params, session.rank, round_), 2)
            assert committed(whole, 25)
        assert bits(job) == bits(whole)


def test_who_joins_before_lost_memory_is_rolled_back_waits_for_that(store: Store) -> None:
    job = store.create_job("job", model(), lease_ms=300, **OVER_SHM)
    with aggregating(job), job.join("w0") as session:
        for round_ in range(3):
            session.push(gradient(session.pull(), 0, round_))
        session.leave(finished=False)
    shared_memory.forget(segments_of(job).folder)

    def as_a_copy() -> None:
        while True:
            with suppress(kvps.WorkerEvicted):  # the aggregator may be about to roll back: a copy is started again
                work_on(job, "w0", 6)
                return

    with ThreadPoolExecutor(1) as early:
        trained = early.submit(as_a_copy)
        with aggregating(job):
            trained.result()
            assert committed(job, 6)


def test_each_loss_stays_in_the_log_though_the_next_goes_further_back(store: Store) -> None:
    """Memory is lost again before Redis was given anything since."""
    job = store.create_job("job", model(), lease_ms=300, **OVER_SHM)
    assert segments_of(job)
    for rounds in (3, 2, 0):
        with abandoned(job) as aggregator:
            take(aggregator)
            if rounds:
                train(job.join("w0"), aggregator, rounds)
        shared_memory.forget(segments_of(job).folder)
    assert recoveries(job) == [("0", "3"), ("0", "2")]
    assert check_chain(job) == 0


def test_what_a_loss_would_undo_is_not_cut_from_the_log(store: Store) -> None:
    job = store.create_job("job", model(), lease_ms=300, **OVER_SHM)
    assert segments_of(job)
    with abandoned(job, log=KeptLog(3)) as aggregator, job.join("w0") as session:
        train(session, aggregator, 10)
        aggregator.held.flush()
        train(session, aggregator, 8)
        aggregator.held.history.close()
        abandon(session)
    kept, before = job.access.transport.safe_version(99), job.state()
    assert 1 < before.moved <= kept
    shared_memory.forget(segments_of(job).folder)
    with aggregating(job):
        assert eventually(lambda: job.state().history != before.history)
        work_on(job, "w0", 20)
        assert committed(job, 20)
    assert recoveries(job) == [(f"{kept}", f"{18 - kept}")]
    assert check_chain(job) == 20


def test_memory_that_is_lost_under_a_living_holder_is_taken_anew(store: Store) -> None:
    """As when a user's last login ends, and systemd removes what is his in /dev/shm: the job was not removed."""
    job = store.create_job("job", model(), lease_ms=300, **OVER_SHM)
    assert segments_of(job)
    with abandoned(job) as aggregator, job.join("w0") as session:
        train(session, aggregator, 2)
        session.push(gradient(session.pull(), 0, 2))
        shared_memory.forget(segments_of(job).folder)
        aggregator.work()  # meets the loss in the middle of a step
        take(aggregator)
        with pytest.raises(kvps.WorkerEvicted):
            session.pull()
        abandon(session)
        train(job.join("w0"), aggregator, 1)
    assert recoveries(job) == [("0", "2")]
    assert check_chain(job) == 1


def test_what_a_rollback_loses_is_said_as_the_log_says_it(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    """The holder's own count differs after a lost reply, or when the server has forgotten a version; so may the call be
    made twice."""
    job = store.create_job("job", model(), lease_ms=300, **OVER_SHM)
    assert segments_of(job)
    with abandoned(job) as aggregator, job.join("w0") as session:
        train(session, aggregator, 2)
        shard = aggregator.held.shards[0]
        shard.version += 1
        with pytest.raises(kvps.LeaseLost):
            shard.storage._roll_back()
        assert job.access.scripts.rollback(shard.term, job.state().history, job.config.metadata.memory) == (0, 2), (
            "asked again"
        )
        abandon(session)
    assert recoveries(job) == [("0", "2")]
    assert "goes on from version 0, which Redis has; lost the last 2 versions" in caplog.text


def test_a_holder_that_has_nothing_to_do_notices_too_that_the_memory_is_lost(store: Store) -> None:
    """Or nobody could join, and so nobody would give it anything to do."""
    job = store.create_job("job", model(), lease_ms=300, **OVER_SHM)
    assert segments_of(job)
    with aggregating(job):
        with job.join("w0") as session:
            for round_ in range(3):
                session.push(gradient(session.pull(), 0, round_))
            assert committed(job, 3)
            shared_memory.forget(segments_of(job).folder)
            assert eventually(lambda: job.state().version == 0)
            abandon(session)
        work_on(job, "w0", 4)
        assert committed(job, 4)
    assert check_chain(job) == 4


@pytest.mark.parametrize("by", ["its holder", "the next holder"])
def test_a_contribution_whose_memory_was_written_anew_is_done_again_and_not_rejected(store: Store, by: str) -> None:
    """A server that forgot a commit waits for what its worker has seen committed, and written over since."""
    settings = {"optimizer": kvps.SGD(lr=0.05), "lease_ms": 300}
    job = store.create_job("job", model(), **settings, **OVER_SHM)
    assert segments_of(job)
    with abandoned(job) as aggregator, job.join("w0") as session:
        train(session, aggregator, 1)
        session.push(gradient(session.pull(), 0, 1))
        segments_of(job).unlink([f"g:w0.{session.incarnation}:2"])
        if by == "its holder":
            aggregator.work()
            assert job.state().version == 0
            with pytest.raises(kvps.WorkerEvicted):
                session.pull()
        abandon(session)
    with aggregating(job):
        assert eventually(lambda: job.state().version == 0)
        work_on(job, "w0", 5)
        assert committed(job, 5)
    assert not [f for _, f in log_entries(job) if f["kind"] == "reject"]
    assert check_chain(job) == 5
    assert_same_bits(job.snapshot()[1], plain_loop(model(), 1, 5, 0.05))


def test_a_full_memory_is_said_and_waited_for(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    job = store.create_job("job", model(), lease_ms=60_000, optimizer=kvps.SGD(lr=0.01), **OVER_SHM)
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
    assert_same_bits(job.snapshot()[1], plain_loop(model(), 1, 1, 0.01))
