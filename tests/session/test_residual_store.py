"""A worker that leaves and comes back goes on with what its format had left out; and nobody else ever does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.commands import kvps_run
from helpers.digits_job import digits_job, proved, run_workers, task_gradient
from helpers.harness import aggregating, log_entries, model
from helpers.servers import running_server
from helpers.waiting import eventually
from kvps_aggregator import Aggregator, Outcome
from kvps_aggregator.checkpoints import Checkpoints
from kvps_cli.prove.verify import proof_of

import kvps
from kvps.connection.client import Client
from kvps.history.checkpoint import Checkpoint
from kvps.history.commit_log import Log
from kvps.history.log_stream import LogStream
from kvps.job import Job
from kvps.protocol.job_state import Member
from kvps.protocol.scripts import JobScripts
from kvps.session.residual_store import ResidualStore
from kvps.session.session import Session
from kvps.store import Store

PATIENT = {"worker_timeout_ms": 60_000}
ROUNDS = 8
ONE = {"x": np.ones(5000, np.float32)}

Between = Callable[[Job, Session], Session]


def _stored(job: Job) -> set[str]:
    """The names of the residuals of which bytes are stored: "<worker>.<incarnation>:<seq>"."""
    keys = (key.split(":")[2:] for key in job.access.client.scan(job.access.keys.all_bytes))
    return {":".join(rest[:2]) for kind, *rest in keys if kind == "r"}


def _inherited(job: Job) -> str:
    """The name of the residual that the last worker to join was given, as the log says; "" if it was given none."""
    return [fields.get("residual", "") for _, fields in log_entries(job) if fields["kind"] == "join"][-1]


def _member(job: Job, worker: str = "w0") -> Member:
    return job.state().members[worker]


def _noise(seed: int) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(seed).normal(size=ONE["x"].size).astype(np.float32)}


def _push(session: Session, seed: int = 0) -> None:
    session.pull()
    session.push(_noise(seed))


def _leave_and_come_back(job: Job, session: Session) -> Session:
    session.leave(finished=False)
    return job.join(session.worker)


def _evict(job: Job, session: Session) -> None:
    job.access.scripts.evict(session.worker, session.incarnation)
    with pytest.raises(kvps.WorkerEvicted):
        session.leave(finished=False)


# -- training goes on as if nothing had been -------------------------------------------------------------------------


def _trained(store: Store, between: dict[int, Between], **settings: Any) -> Job:
    """Two workers in BSP; before some rounds of w0, counted from 0, something comes between."""
    job = digits_job(store, workers=2, shards=2, **settings, **PATIENT)
    with aggregating(job):
        sessions = [job.join(f"w{i}") for i in range(2)]
        for round_ in range(ROUNDS):
            if round_ in between:
                sessions[0] = between[round_](job, sessions[0])
            for session in sessions:
                grads = task_gradient(job, session)
                session.push(grads)
        for session in sessions:
            session.pull()
            session.leave(finished=True)
    assert job.state().version == ROUNDS
    assert proved(job).by == "recomputed"
    return job


def _bits(job: Job) -> bytes:
    return b"".join(array.tobytes() for array in job.snapshot()[1].values())


@pytest.mark.slow
@pytest.mark.parametrize("gradient_format", ["int8", "topk:0.1"])
def test_who_leaves_and_comes_back_makes_the_same_weights(store: Store, gradient_format: str) -> None:
    """Also twice without a push in between, and if the one who came back first was killed before its first push."""

    def and_is_killed_at_once(job: Job, session: Session) -> Session:
        _evict(job, _leave_and_come_back(job, session))
        return _leave_and_come_back(job, job.join("w0"))

    whole = _bits(_trained(store, {}, gradient_format=gradient_format))
    store.remove_job("digits")
    between = {3: _leave_and_come_back, 4: and_is_killed_at_once}
    assert _bits(_trained(store, between, gradient_format=gradient_format)) == whole


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1, -1])
def test_workers_that_come_and_go_are_replayed_bit_for_bit(store: Store, staleness: int) -> None:
    job = digits_job(store, gradient_format="int8", staleness=staleness, shards=2)

    def worker(number: int) -> None:
        finished = False
        while not finished:
            session = job.join(f"w{number}")
            for _ in range(number + 1):
                if finished := session.round >= 15:
                    break
                session.push(task_gradient(job, session))
            session.leave(finished)

    run_workers(job, *[lambda number=number: worker(number) for number in range(3)])
    assert proved(job).by == "recomputed"
    joins = [fields["residual"] for _, fields in log_entries(job) if fields["kind"] == "join"]
    assert sum(map(bool, joins)) == len(joins) - 3 > 3, "all but the first of each"
    assert not _stored(job)


# -- what it is good for, and for how long ---------------------------------------------------------------------------


def test_its_bytes_live_until_the_next_incarnation_has_pushed(store: Store) -> None:
    job = store.create_job("job", ONE, shards=2, gradient_format="int8", **PATIENT)
    aggregator = Aggregator(job, threading.Event())
    aggregator.hold()

    def swept() -> set[str]:
        aggregator.sweep()
        return _stored(job)

    first = job.join("w0")
    _push(first)
    assert aggregator.work() is Outcome.COMMITTED
    first.leave(finished=False)
    kept = {f"w0.{first.incarnation}:1"}
    assert swept() == kept
    second = job.join("w0")
    assert _inherited(job) == _member(job).residual != ""
    assert swept() == kept
    second.pull()
    second.put("x", ONE["x"])
    assert swept() == kept, "it has read them, but if it is killed now the next one must, too"
    second.push()
    assert _member(job).residual == ""
    assert swept() == set()
    assert aggregator.work() is Outcome.COMMITTED
    second.leave(finished=True)
    assert swept() == set(), "who has done all its rounds does not come back"
    store.remove_job("job")
    assert not list(store.client.scan("kvps:{job*"))
    aggregator.release()


def test_a_removed_job_leaves_nothing_though_a_worker_is_leaving(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    job = store.create_job("job", ONE, gradient_format="int8", **PATIENT)
    session = job.join("w0")
    _push(session)
    save = ResidualStore.save

    def late(*arguments: Any) -> str:
        store.remove_job("job")
        return save(*arguments)

    monkeypatch.setattr(ResidualStore, "save", late)
    with pytest.raises(kvps.JobNotFound):
        session.leave(finished=False)
    assert not list(store.client.scan("kvps:{job*"))


def test_who_was_replaced_while_it_stored_is_not_inherited_from(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    job = store.create_job("job", ONE, gradient_format="int8", **PATIENT)
    aggregator = Aggregator(job, threading.Event())
    aggregator.hold()
    session = job.join("w0")
    _push(session)
    save, others = ResidualStore.save, []

    def replaced(*arguments: Any) -> str:
        name = save(*arguments)
        aggregator.sweep()
        assert _stored(job), "who is about to leave may still name it"
        others.append(job.join("w0", takeover=True))
        return name

    with monkeypatch.context() as replacing:
        replacing.setattr(ResidualStore, "save", replaced)
        session.leave(finished=False)
    (other,) = others
    assert _inherited(job) == _member(job).residual == ""
    aggregator.sweep()
    assert not _stored(job)
    other.leave(finished=False)
    assert _member(job).residual == ""
    aggregator.release()


def test_a_remainder_of_another_clock_is_never_noted(store: Store) -> None:
    """Whatever who leaves believes: leave.lua knows what was accepted."""
    job = store.create_job("job", ONE, gradient_format="int8", staleness=8, **PATIENT)
    session = job.join("w0")
    _push(session)
    for name in (f"{session.incarnation}:0:d", f"{session.incarnation}:2:d", "1-other:1:d", "d", ""):
        with job.join("w0", takeover=True) as again:
            _push(again)
            job.access.scripts.leave("w0", again.incarnation, False, (), name)
            assert _member(job).residual == ""
    last = job.join("w0")
    _push(last)
    for _ in range(2):
        job.access.scripts.leave("w0", last.incarnation, False, (), f"{last.incarnation}:1:d")
        assert _member(job).residual == f"{last.incarnation}:1:d", "a repeat changes nothing"


def test_a_push_that_counted_though_nobody_was_told_ends_it(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """What its author has left out is of the contribution before; the one that follows begins with nothing."""
    job = digits_job(store, workers=1, gradient_format="int8", **PATIENT)
    with aggregating(job):
        session = job.join("w0")
        session.push(task_gradient(job, session))
        grads, accept = task_gradient(job, session), JobScripts.push

        def cut(*arguments: Any, **named: Any) -> None:
            accept(*arguments, **named)
            raise KeyboardInterrupt

        with monkeypatch.context() as cutting:
            cutting.setattr(JobScripts, "push", cut)
            with pytest.raises(KeyboardInterrupt):
                session.push(grads)
        session.leave(finished=False)
        assert not _stored(job)
        with job.join("w0") as again:
            assert (again.clock, _inherited(job)) == (2, "")
            again.push(task_gradient(job, again))
            again.pull()
    assert proved(job).contributions == 3


def test_units_that_come_back_are_computed_with_it(store: Store) -> None:
    """Who finds no unit free has finished, and may come back for those of the dead; when all are done nobody does."""
    job = store.create_job("job", ONE, workers=2, units=3, gradient_format="int8", staleness=8, **PATIENT)
    aggregator = Aggregator(job, threading.Event())
    aggregator.hold()
    w0, w1 = job.join("w0"), job.join("w1")
    for session in (w0, w1, w0):
        assert session.next_unit() is not None
        if session is not w1:
            _push(session)
    assert w0.next_unit() is None
    w0.leave(finished=True)
    _evict(job, w1)
    w0 = job.join("w0")
    assert _inherited(job)
    assert w0.next_unit() == 1
    _push(w0)
    w0.leave(finished=True)
    assert len(_stored(job)) == 2
    while aggregator.work() is not Outcome.IDLE:
        pass
    aggregator.sweep()
    assert not _stored(job)
    with job.join("w0") as late:
        assert late.next_unit() is None, "who comes all the same finds nothing to do, and needs nothing"
    aggregator.release()


def test_who_finds_no_room_leaves_without_it() -> None:
    params = {"x": np.zeros(600_000, np.float32)}
    with running_server("--maxmemory", "200mb") as url, Client(url, patience_s=0.2) as client:
        job = Store(client).create_job("job", params, shards=2, gradient_format="int8", **PATIENT)
        session = job.join("w0")
        session.pull()
        session.push({"x": np.random.default_rng(0).normal(size=600_000).astype(np.float32)})
        client.call("CONFIG", "SET", "maxmemory", client.memory()[0] + 1_500_000)
        session.leave(finished=False)
        assert not _stored(job), "nor is any part of it there"
        client.call("CONFIG", "SET", "maxmemory", 0)
        with job.join("w0") as again:
            assert (again.clock, _inherited(job)) == (1, "")


@pytest.mark.parametrize("harm", ["SETRANGE", "DEL"])
def test_bytes_that_are_damaged_or_gone_are_an_error(store: Store, harm: str) -> None:
    """Not a training that differs from what the log says of it."""
    job = store.create_job("job", ONE, shards=2, gradient_format="int8", **PATIENT)
    session = job.join("w0")
    _push(session)
    session.leave(finished=False)
    key = job.access.keys.residual(1, "w0", session.incarnation, 1, 0)
    store.client.call(harm, key, *((3, "bad!") if harm == "SETRANGE" else ()))
    with aggregating(job), job.join("w0") as again:
        again.pull()
        with pytest.raises(kvps.CorruptData, match=r"'w0'.* stored when it left is (damaged|not there)"):
            again.push(_noise(1))


# -- the proof -------------------------------------------------------------------------------------------------------


def test_the_log_is_asked_also_where_it_was_moved(store: Store, tmp_path: Path) -> None:
    """From a checkpoint, what was left out before is not known, though the first to be replayed came back behind it."""
    job = digits_job(store, workers=1, gradient_format="int8", **PATIENT)
    with aggregating(job, checkpoints=Checkpoints(tmp_path, 4, keep=99)):
        session = job.join("w0")
        for round_ in range(10):
            if round_ in (2, 4, 6):
                session = _leave_and_come_back(job, session)
            session.push(task_gradient(job, session))
            assert round_ not in (3, 7) or eventually(lambda at=round_ + 1: job.state().moved == at)
        session.pull()
        session.leave(finished=True)
    proof = proof_of(job, checkpoints=tmp_path)[1]
    assert (proof.by, proof.replayed, proof.differs) == ("recomputed", 10, "")
    names = Log(LogStream(job.access), job.state(), tmp_path).inherited().values()
    assert [bool(name) for name in names] == [False, True, True, True]
    for version, words in ((4, "commit 5: contribution 1 of w0"), (8, "commit 9: contribution 3 of w0")):
        start = Checkpoint.load(tmp_path / f"digits.{job.state().id}-{version:08d}.safetensors")
        differs = proof_of(job, None, tmp_path, start)[1].differs
        assert words in differs
        assert "the int8 residual of its worker is unknown" in differs


def test_a_join_that_says_another_beginning_is_caught(store: Store) -> None:
    job = _trained(store, {3: _leave_and_come_back}, gradient_format="int8")
    entries = list(log_entries(job))
    for name, words in (("", "gives another gradient here"), ("1-abcd:3:d", "is unknown"), (None, "is unknown")):
        job.access.client.call("DEL", job.access.keys.commits)
        for entry, fields in entries:
            if fields.get("residual"):
                if name is None:
                    continue
                fields = fields | {"residual": name}
            job.access.client.call(
                "XADD", job.access.keys.commits, entry, *[part for pair in fields.items() for part in pair]
            )
        assert "commit 4: contribution 1 of w0" in (differs := proof_of(job)[1].differs)
        assert words in differs


def test_a_checkpoint_holds_none(store: Store, tmp_path: Path) -> None:
    """The bytes are another job's; who joins the restored one begins with nothing."""
    job = store.create_job("job", model(), gradient_format="int8", **PATIENT)
    with aggregating(job):
        session = job.join("w0")
        session.push({name: np.ones_like(array) for name, array in session.pull().items()})
        session.pull()
        session.leave(finished=False)
    assert _member(job).residual
    made = job.checkpoint()
    made.write(tmp_path / made.filename)
    restored = store.restore_job(Checkpoint.load(tmp_path / made.filename), "again")
    assert _member(restored).residual == ""
    with restored.join("w0") as again:
        assert (again.clock, _inherited(restored)) == (1, "")


@pytest.mark.slow
def test_a_worker_that_is_stopped_and_started_again_makes_the_same_weights(lasting: kvps.Store, start: Any) -> None:
    """By SIGTERM, while it waits for another."""
    jobs = []
    for name in ("whole", "stopped"):
        options = ["--workers", "2", "--epochs", "3", "--batch-size", "96", "--gradient-format", "int8"]
        assert kvps_run("create", "digits", "--job", name, *options).returncode == 0
        jobs.append(job := lasting.job(name))
        work = [["worker", "--job", name, "--id", f"w{i}"] for i in range(2)]
        if name == "stopped":
            first = start(*work[0])
            assert eventually(lambda: int(lasting.client.call("INFO", "clients")["blocked_clients"]) == 1)
            first.end()
            assert (_member(job).state, _member(job).accepted) == ("draining", 1)
            assert _member(job).residual.startswith(f"{_member(job).incarnation}:1:")
        started = [start(*work[0])]
        assert eventually(lambda: "w0" in job.state().members and _member(job).active)
        started += [start(*work[1]), start("aggregator", "start", "--job", name)]  # else w1 goes on alone
        assert [each.wait() for each in started] == [0, 0, 0]
        assert "bit-identical" in kvps_run("verify", name).stdout
    assert [_member(job).incarnation[0] for job in jobs] == ["1", "2"]
    assert _bits(jobs[0]) == _bits(jobs[1])
