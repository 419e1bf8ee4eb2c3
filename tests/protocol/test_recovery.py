"""Redis is killed, restarted, and loses what it had not written: the job goes on, and what was lost is said."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from helpers.arrays import assert_same_bits
from helpers.faults import MortalServer
from helpers.harness import aggregating, check_chain, gradient, model, plain_loop, work_on
from helpers.servers import private_directory
from helpers.waiting import eventually
from kvps_aggregator import Aggregator, Outcome, serve

import kvps
from kvps.job import Job
from kvps.protocol.answers import ServerRestarted
from kvps.protocol.recovery import file_is_whole
from kvps.store import Store

ROUNDS = 40
PATIENT = {"worker_timeout_ms": 60_000, "lease_ms": 300}


@pytest.fixture
def mortal() -> Iterator[MortalServer]:
    with private_directory() as folder, MortalServer(folder) as server:
        yield server


def _lose(mortal: MortalServer, length: int) -> None:
    """Kill the server, and start it with what it wrote up to this length of its file."""
    mortal.kill()
    mortal.restore(mortal.files(), length)
    mortal.start()


@pytest.mark.contract
def test_bsp_goes_on_bit_for_bit_when_redis_is_killed(mortal: MortalServer) -> None:
    with kvps.connect(mortal.url) as store:
        job = store.create_job(
            "job", model(), workers=2, shards=2, optimizer=kvps.SGD(lr=0.05, momentum=0.9), **PATIENT
        )
        with aggregating(job), ThreadPoolExecutor(2) as pool:
            done = [pool.submit(work_on, job, f"w{i}", ROUNDS) for i in range(2)]
            for version in (5, 17, 29):
                assert eventually(lambda v=version: job.state().version >= v)
                mortal.kill()
                mortal.start()
            clocks = [d.result() for d in done]
            assert eventually(lambda: job.state().finished(job.config))
        histories = [
            f["history"]
            for _, f in job.access.client.call("XRANGE", job.access.keys.commits, "-", "+")
            if f["kind"] == "recover"
        ]
        assert len(set(histories)) == 3, "each run of the server is a new history"
        assert check_chain(job) == ROUNDS
        assert job.state().clock == {"w0": ROUNDS, "w1": ROUNDS}, "with appendfsync always nothing acknowledged is lost"
        assert all(c == sorted(set(c)) for c in clocks)
        store.create_job("plain", model(), workers=2, shards=2, optimizer=kvps.SGD(lr=0.05, momentum=0.9), **PATIENT)
        plain = store.job("plain")
        with aggregating(plain), ThreadPoolExecutor(2) as pool:
            list(pool.map(work_on, [plain] * 2, ["w0", "w1"], [ROUNDS] * 2))
            plain.await_finished()
        assert_same_bits(job.snapshot()[1], plain.snapshot()[1])


@pytest.mark.slow
def test_a_log_cut_anywhere_is_an_earlier_whole_state_and_the_loss_is_said(
    mortal: MortalServer, caplog: pytest.LogCaptureFixture
) -> None:
    """The append-only file ends at every so many bytes of the last commits, as after a power cut."""
    caplog.set_level(logging.WARNING, "kvps.lease")
    with kvps.connect(mortal.url) as store:
        job = store.create_job(
            "job", {"x": np.zeros(3, np.float32)}, shards=2, reduction="sum", optimizer=kvps.SGD(lr=1.0), **PATIENT
        )
        sizes = []
        with job.join("w0") as session:
            aggregator = Aggregator(job, threading.Event())
            aggregator.hold()
            for round_ in range(6):
                session.pull()
                session.push({"x": np.full(3, 2.0**round_, np.float32)})
                assert aggregator.work() is Outcome.COMMITTED
                sizes.append(mortal.log().stat().st_size)
            aggregator.release()
        mortal.kill()
        whole = mortal.files()
        mixed, cuts = [], range(sizes[3], sizes[5], max(1, (sizes[5] - sizes[3]) // 25))
        for cut in cuts:
            mortal.restore(whole, cut)
            mortal.start()
            here = store.job("job")
            version, weights = here.snapshot()
            want = np.full(3, 1.0 - 2.0**version, np.float32)
            state = here.state()
            if check_chain(here) != version or not np.array_equal(weights["x"], want) or state.clock["w0"] != version:
                mixed.append(cut)
            # Who remembers version 6 finds it gone, and says how much.
            witness = Aggregator(here, threading.Event())
            witness.held.leases.newest = 6
            assert eventually(witness.held.leases.watch)
            assert here.state().history != state.history
            witness.hold()
            witness.work()  # commits what is left of version + 1, if it had been accepted
            after, weights = here.snapshot()
            assert np.array_equal(weights["x"], np.full(3, 1.0 - 2.0**after, np.float32))
            assert version == 6 or f"lost the last {6 - version} version" in caplog.text
            witness.release()
            assert eventually(lambda h=here: not _rewriting(h))
            caplog.clear()
            mortal.kill()
        assert len(cuts) >= 25
        assert mixed == []
        mortal.start()


def test_a_holder_that_remembers_more_does_not_go_on_from_it(mortal: MortalServer) -> None:
    """Redis loses a commit; holder and worker live on, and the worker's lost rounds are done again."""
    with kvps.connect(mortal.url) as store:
        job = store.create_job("job", model(), optimizer=kvps.SGD(lr=0.05), **PATIENT)
        aggregator = Aggregator(job, threading.Event())
        session = job.join("w0")
        cut = 0
        for round_ in range(5):
            if round_ == 3:
                cut = mortal.log().stat().st_size
            session.push(gradient(session.pull(), 0, round_))
            aggregator.hold()
            assert aggregator.work() is Outcome.COMMITTED
        _lose(mortal, cut)
        with pytest.raises(kvps.WorkerEvicted, match="restarted"):
            session.pull()
        aggregator.release()
        with aggregating(job):
            assert work_on(job, "w0", 10) == [4, 5, 6, 7, 8, 9, 10]
            assert eventually(lambda: job.state().version == 10)
        check_chain(job)
        assert_same_bits(job.snapshot()[1], plain_loop(model(), 1, 10, 0.05))


def test_what_was_acknowledged_in_a_lost_life_is_refused_and_not_mixed_in(mortal: MortalServer) -> None:
    with kvps.connect(mortal.url) as store:
        job = store.create_job("job", model(), staleness=3, **PATIENT)
        session = job.join("w0")
        cut = mortal.log().stat().st_size
        for round_ in range(3):
            session.push(gradient(session.pull(), 0, round_))
        session.pull()
        _lose(mortal, cut)
        with pytest.raises(kvps.WorkerEvicted, match="restarted"):
            session.push(gradient(model(), 0, 3))
        assert _waiting(job) == 0
        assert eventually(Aggregator(job, threading.Event()).held.leases.watch)
        with job.join("w0") as again:
            assert again.clock == 0


@pytest.mark.parametrize("known", [True, False], ids=["known before", "unknown"])
def test_whose_join_is_lost_is_not_told_that_its_rounds_are_done(mortal: MortalServer, known: bool) -> None:
    """A restart of the server lacks its join, so all it was acknowledged too: that another had the id is long past."""
    with kvps.connect(mortal.url) as store:
        job = store.create_job("job", model(), **PATIENT)
        if known:
            job.join("w0").leave(finished=False)
        cut = mortal.log().stat().st_size
        session = job.join("w0")
        session.push(gradient(session.pull(), 0, 0))
        _lose(mortal, cut)
        job.access.scripts.recover(store.client.run_id(), "abcd1234", 0)
        with pytest.raises(kvps.WorkerEvicted):
            session.leave(finished=True)


def _rewriting(job: Job) -> bool:
    """A server that is killed meanwhile leaves a child that holds its connections open for seconds."""
    persistence = job.access.client.call("INFO", "persistence")
    return bool(persistence["aof_rewrite_in_progress"] or persistence["aof_rewrite_scheduled"])


def _waiting(job: Job) -> int:
    return int(job.access.client.call("XLEN", job.access.keys.inbox))


def test_a_file_that_ended_in_a_transaction_is_written_anew(mortal: MortalServer) -> None:
    """Redis drops only the command that was cut: the rest of its transaction would be run at the start after this."""
    with kvps.connect(mortal.url) as store:
        job = store.create_job("job", model(), optimizer=kvps.SGD(lr=0.05), **PATIENT)
        with aggregating(job):
            assert work_on(job, "w0", 5) == [1, 2, 3, 4, 5]
            assert eventually(lambda: job.state().version == 5)
        whole = mortal.log().read_bytes()
        _lose(mortal, whole.index(b"head", whole.rindex(b"HINCRBY")))
        witness = Aggregator(job, threading.Event())
        witness.held.leases._run_id = "an earlier one"
        assert eventually(witness.held.leases.watch)
        witness.release()
        mortal.kill()
        mortal.start()
        assert check_chain(job) == job.state().clock["w0"] == 4


def test_a_file_that_cannot_be_written_anew_is_said_and_the_job_goes_on(
    mortal: MortalServer, caplog: pytest.LogCaptureFixture
) -> None:
    with kvps.connect(mortal.url) as store:
        job = store.create_job("job", model(), **PATIENT)
        history = job.state().history
        mortal.kill()
        mortal.start()
        folder = mortal.log().parent
        folder.rename(mortal.folder / "away")
        folder.touch()  # as a folder, the server would make it
        with aggregating(job):
            work_on(job, "w0", 3)
        assert job.state().history != history
        assert check_chain(job) == 3
    assert "the server does not write its append-only file anew: " in caplog.text


def test_a_user_who_may_not_write_the_file_anew_waits_for_one_who_may(mortal: MortalServer) -> None:
    with kvps.connect(mortal.url) as store:
        mortal.kill()
        mortal.start()
        store.client.call("ACL", "SETUSER", "default", "-bgrewriteaof")
        assert not file_is_whole(store.client)
        store.client.call("ACL", "SETUSER", "default", "+bgrewriteaof")
        assert not file_is_whole(store.client), "it has just begun"
        assert eventually(lambda: file_is_whole(store.client))


@pytest.mark.slow
def test_nothing_is_written_behind_half_a_transaction(mortal: MortalServer) -> None:
    """The server is killed again while it writes its file anew. What stood behind the half would have run it: the clock
    would be ahead of the version."""
    with kvps.connect(mortal.url) as store:
        job = store.create_job("job", model(), optimizer=kvps.SGD(lr=0.05), **PATIENT)
        session = job.join("w0")
        aggregator = Aggregator(job, threading.Event())
        aggregator.hold()
        for round_ in range(3):
            session.push(gradient(session.pull(), 0, round_))
            assert aggregator.work() is Outcome.COMMITTED
        whole = mortal.log().read_bytes()
        mortal.kill()
        mortal.restore(mortal.files(), whole.index(b"head", whole.rindex(b"HINCRBY")))
        mortal.start("--rdb-key-save-delay", "1000000")  # microseconds, for each key of a file that is written anew
        with ThreadPoolExecutor(3) as pool:
            others = [
                pool.submit(job.access.scripts.heartbeat, "w0", session.incarnation),
                pool.submit(job.access.scripts.plan),
                pool.submit(job.access.scripts.evict, "w0", session.incarnation),
            ]
            assert all(isinstance(other.exception(), ServerRestarted) for other in others)
            joining = pool.submit(job.join, "w0", takeover=True)
            for _ in range(20):
                assert not aggregator.held.leases.watch()
            assert not joining.done(), "who joins waits, too"
            mortal.kill()
            if not _starts(mortal):
                with pytest.raises(kvps.ServerLost):
                    joining.result()
                return
            assert joining.result().round == 3, "its third contribution waits for a commit"
        state = job.state()
        assert (state.version, state.clock["w0"], state.members["w0"].pending) == (2, 2, 1)
        assert eventually(lambda: aggregator.held.leases.watch() and _commits(aggregator))
        assert check_chain(job) == job.state().clock["w0"] == 3


def _commits(aggregator: Aggregator) -> bool:
    aggregator.hold()
    return aggregator.work() is Outcome.COMMITTED


def _starts(mortal: MortalServer) -> bool:
    """Whether it starts. Redis 7 refuses when any file but its last is cut short: half a transaction is not loaded."""
    try:
        mortal.start()
    except RuntimeError:
        assert "the truncated file is not the last file" in mortal.said()
        return False
    return True


@pytest.mark.contract
def test_before_a_new_history_nothing_is_accepted_committed_or_deleted(mortal: MortalServer) -> None:
    """The server was restarted, and nobody has noticed yet: its run id alone gives it away."""
    with kvps.connect(mortal.url) as store:
        job = store.create_job("job", model(), staleness=1, **PATIENT)
        s = job.access.scripts
        session, other = job.join("w0"), job.join("w1")
        session.push(gradient(session.pull(), 0, 0))
        plan = s.plan().plan
        assert plan
        term, *_ = s.acquire(0, "me", 60_000, "nonce")
        s.own(0, term)
        before = job.state()
        mortal.kill()
        mortal.start()
        with pytest.raises(ServerRestarted):
            s.ready(0, term, plan, "digest")
        with pytest.raises(ServerRestarted):
            s.free(0, term, before.run_id, [job.access.keys.weights(0, before.names[0], 0)])
        with pytest.raises(ServerRestarted):
            s.leave("w0", session.incarnation, True)
        with pytest.raises(ServerRestarted):
            s.push("w1", other.incarnation, 1, 0, 1, "0", before.history)
        assert job.state() == before
        assert s.ask("w0", session.incarnation, 1), "what was accepted is still acknowledged"
        with pytest.raises(kvps.WorkerEvicted, match="restarted"):
            session.leave()
        assert job.state().history != before.history, "who notices begins it"
        with job.join("w0") as again:
            assert again.round == 1


@pytest.mark.contract
def test_a_server_that_begins_a_new_life_while_a_job_ends(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has lost that the last worker left, and another has noticed: the aggregator goes on until that comes again."""
    job = store.create_job("job", {"x": np.zeros(3, np.float32)}, **PATIENT)
    with job.join("w0") as session:
        session.pull()
        there = job.access.client.call("HGET", job.access.keys.workers, "w0")
    finish, lost = Aggregator._finish, threading.Event()

    def interrupted(self: Aggregator) -> None:
        if not lost.is_set():
            self.held.leases._run_id = "the one before"
            job.access.client.call("HSET", job.access.keys.version, "run_id", "the one before")
            job.access.client.call("HSET", job.access.keys.workers, "w0", there)
            job.access.scripts.recover(job.access.client.run_id(), "00000001", 0)
            lost.set()
        finish(self)

    monkeypatch.setattr(Aggregator, "_finish", interrupted)
    with ThreadPoolExecutor(1) as pool:
        serving = pool.submit(serve, job)
        assert lost.wait(120)
        with job.join("w0", takeover=True) as session:
            session.pull()
            session.push({"x": np.ones(3, np.float32)})
            assert eventually(lambda: job.state().version == 1)
        serving.result()
    assert job.state().finished(job.config)
