"""A job that is removed is gone for all who hold it, and one that is made under its name afterwards is another job."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.harness import aggregating, check_chain, gradient, model, work
from helpers.internals import fall_silent
from helpers.waiting import eventually
from kvps_aggregator import Aggregator

import kvps
from kvps.job import Job, await_unit
from kvps.protocol.scripts import JobScripts
from kvps.store import Store

pytestmark = pytest.mark.contract

ME = {"host": "here", "pid": 1, "start": "", "space": "", "device": "cpu"}


def _dump(store: Store) -> dict[str, bytes]:
    """All that is on the server."""
    return {key: store.client.call("OBJECT", "ENCODING", key) and _value(store, key) for key in store.client.scan("*")}


def _value(store: Store, key: str) -> Any:
    reads = {"hash": "HGETALL", "string": "STRLEN", "set": "SMEMBERS"}
    kind = store.client.call("TYPE", key)
    if kind == "zset":
        return store.client.call("ZRANGE", key, 0, -1, "WITHSCORES")
    return store.client.call("XRANGE", key, "-", "+") if kind == "stream" else store.client.call(reads[kind], key)


def _made_anew(store: Store, **settings: Any) -> Job:
    store.remove_job("job")
    return store.create_job("job", model(1), **settings)


def test_who_holds_a_removed_job_does_nothing_to_one_made_anew(store: Store) -> None:
    """Everything that a worker, a reader, an aggregator or a supervisor may call means the job that it was given."""
    old = store.create_job("job", model(), workers=2, staleness=1, units=5)
    session, other = old.join("w0"), old.join("w1")
    session.next_unit()
    session.push(gradient(session.pull(), 0, 0))
    plan = old.access.scripts.plan().plan
    term = old.access.scripts.acquire(0, "holder", 10_000, "n1").term
    old.access.scripts.own(0, term)
    new = _made_anew(store, workers=2, staleness=1, units=5)
    new.join("w0")
    me, before, s = session.incarnation, _dump(store), old.access.scripts
    calls: dict[str, Callable[[], object]] = {
        "pull": other.pull,
        "next_unit": other.next_unit,
        "ask": lambda: s.ask("w0", me, 1),
        "push": lambda: s.push("w0", me, 1, 0, 1, "0", plan.history, 0),
        "heartbeat": lambda: s.heartbeat("w0", me),
        "trace": lambda: s.trace(0, ["version 1"]),
        "leave": lambda: session.leave(finished=False),
        "join": lambda: old.join("w1"),
        "join any": old.join,
        "takeover": lambda: old.join("w0", takeover=True),
        "state": old.state,
        "round_state": old.access.reader.round_state,
        "snapshot": old.snapshot,
        "checkpoint": old.checkpoint,
        "plan": s.plan,
        "ready": lambda: s.ready(0, term, plan, "d"),
        "reject": lambda: s.reject(0, term, plan, plan.contributions[0], "because"),
        "acquire": lambda: s.acquire(0, "holder", 10_000, "n2"),
        "renew": lambda: s.renew(0, "holder", term, 10_000),
        "evict": lambda: s.evict("w0", "1-abc"),
        "recover": lambda: s.recover("another", "abcd", 0),
        "mirror": lambda: s.mirror(term, old.id, "{}"),
        "rollback": lambda: s.rollback(term, "abcd", ""),
        "trim": lambda: s.trim(plan.history, "0-1", 0),
        "pin": lambda: s.pin(1000),
        "remove": lambda: s.remove(["w0", "w1"]),
        "await_finished": old.await_finished,
        "await_unit": lambda: await_unit(old),
    }
    for name, call in calls.items():
        assert "was removed, and another one has its name now" in _refusal(call), name
    after = _dump(store)
    for key in {*before, *after} - {"kvps:preflight", new.access.keys.heartbeat}:
        assert before.get(key) == after.get(key), key
    fall_silent(other)


def _refusal(call: Callable[[], object]) -> str:
    with pytest.raises(kvps.JobNotFound) as refused:
        call()
    return str(refused.value)


def test_an_aggregator_of_a_removed_job_leaves_the_new_one_alone(store: Store) -> None:
    """It slept while the job was removed and made anew: neither its sweep nor its lease touches that."""
    old = store.create_job("job", model(), workers=1)
    aggregator = Aggregator(old, threading.Event())
    aggregator.hold()
    new = _made_anew(store, workers=1)
    aggregator.run(until_finished=False)  # ends, since its job is gone
    assert new.access.reader.terms() == [""]
    with aggregating(new):
        work(new, 3, lambda session, params, r: gradient(params, 0, r), 1)
        assert eventually(lambda: new.state().version == 3)
    assert check_chain(new) == 3


@pytest.mark.parametrize(
    ("what", "kind"),
    [
        *((what, "string") for what in ("version", "workers", "removed", "config", "commits")),
        *((what, "zset") for what in ("version", "layout", "plan", "pin")),
    ],
)
def test_a_job_is_removed_whatever_its_keys_hold(store: Store, raw: Any, what: str, kind: str) -> None:
    job = store.create_job("job", model(), workers=1)
    key = getattr(job.access.keys, what)
    raw.delete(key)
    raw.execute_command(*{"string": ("SET", key, "x"), "zset": ("ZADD", key, 1, "x")}[kind])
    store.remove_job("job")
    assert store.jobs() == []
    assert list(store.client.scan("*{job*")) == []
    assert store.create_job("job", model(), workers=1).state().version == 0


# -- removals that overlap -----------------------------------------------------------------------------------------


@contextmanager
def _removing(store: Store, monkeypatch: pytest.MonkeyPatch, where: Any, name: str) -> Iterator[Any]:
    """A removal that sleeps where it first calls `name` of `where`, until the block is left; its outcome."""
    asleep, goes_on, real = threading.Event(), threading.Event(), getattr(where, name)
    me: list[int] = []

    def slow(*args: Any) -> Any:
        if threading.get_ident() in me:
            asleep.set()
            assert goes_on.wait(120)
        return real(*args)

    def remove() -> None:
        me.append(threading.get_ident())
        store.remove_job("job")

    monkeypatch.setattr(where, name, slow)
    with ThreadPoolExecutor(1) as pool:
        outcome = pool.submit(remove)
        assert asleep.wait(120)
        try:
            yield outcome
        finally:
            goes_on.set()


def _trains(store: Store, job: Job) -> None:
    assert "job" in store.jobs()
    with aggregating(job):
        work(job, 3, lambda session, params, r: gradient(params, 0, r), 1)
        assert eventually(lambda: job.state().version == 3)
    assert check_chain(job) == 3


def test_a_removal_that_sleeps_while_it_settles_leaves_a_new_job_alone(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another removal ends meanwhile and frees the name."""
    store.create_job("job", model(), workers=1).join("w0")._membership.stop_heartbeat()
    with _removing(store, monkeypatch, kvps.store.time, "sleep") as first:
        store.remove_job("job")
        job = store.create_job("job", model(1), workers=1)
        job.join("w0").leave(finished=False)
    first.result()
    _trains(store, job)


def test_a_removal_that_sleeps_before_its_script_leaves_a_new_job_alone(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.create_job("job", model(), workers=1)
    with _removing(store, monkeypatch, JobScripts, "remove") as first:
        store.remove_job("job")
        job = store.create_job("job", model(1), workers=1)
    with pytest.raises(kvps.JobNotFound):
        first.result()
    _trains(store, job)


def test_a_removal_that_was_cut_short_is_ended_by_the_next(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.create_job("job", model(), workers=1)
    with monkeypatch.context() as cut:
        cut.setattr(Store, "_remove_bytes", lambda *_, **__: pytest.fail("killed"))
        with pytest.raises(pytest.fail.Exception):
            store.remove_job("job")
    with pytest.raises(kvps.JobExists, match="is being removed"):
        store.create_job("job", model())
    store.remove_job("job")
    assert [key for key in store.client.scan("*") if key != "kvps:preflight"] == []
    _trains(store, store.create_job("job", model(), workers=1))


def test_who_joins_while_a_job_is_removed_leaves_nothing_behind(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that has joined since the removal looked has a trace, which the next job of that name would inherit."""
    job = store.create_job("job", model(), workers=2, staleness=1)
    with _removing(store, monkeypatch, JobScripts, "remove") as removal:
        session = job.join("w0")
        session.push(gradient(session.pull(), 0, 0))
        session.push(gradient(session.pull(), 0, 1), loss=1.0) if job.access.reader.round_state().joined > 1 else None
        session.leave(finished=False)
    removal.result()
    assert [key for key in store.client.scan("*") if key != "kvps:preflight"] == []


# -- very many workers ---------------------------------------------------------------------------------------------

MANY = 8_200  # Lua passes no more than some 8,000 values to one call


@pytest.mark.slow
def test_8200_workers_are_planned_committed_evicted_recovered_and_removed(store: Store) -> None:
    job = store.create_job("job", {"x": np.zeros(1, np.float32)}, workers=1, units=2 * MANY)
    s, history = job.access.scripts, job.state().history
    for number in range(MANY):
        name = f"x{number}"
        unit_of = s.join(name, "n", "", ME) and s.next_unit(name, "1-n").unit
        s.push(name, "1-n", 1, 0, 0, "-", history, unit_of)
    planned = s.plan()
    assert planned.plan
    assert (planned.members, len(planned.plan.contributions), planned.plan.divisor) == (MANY, MANY, MANY)
    assert [c.worker for c in planned.plan.contributions] == [f"x{number}" for number in range(MANY)]
    term = s.acquire(0, "holder", 60_000, "n1").term
    assert s.ready(0, term, planned.plan, "0" * 16).flipped
    round_state = job.access.reader.round_state()
    assert (round_state.version, round_state.lowest, round_state.joined) == (1, 1, MANY)
    assert job.access.client.call("XLEN", job.access.keys.inbox) == 0
    for run_id in ("another run", store.client.run_id()):
        s.recover(run_id, f"abcd{run_id[:4]}", 1)
    assert {m.state for m in job.state().members.values()} == {"rejoining"}
    s.evict()
    job.access.client.call("ZADD", job.access.keys.heartbeat, *[x for n in range(MANY) for x in (0, f"x{n}")])
    assert len(s.evict().workers) == MANY
    store.remove_job("job")
    assert [key for key in store.client.scan("*") if key != "kvps:preflight"] == []


def test_a_complete_job_says_so_with_a_few_names(store: Store) -> None:
    job = store.create_job("job", {"x": np.zeros(1, np.float32)}, workers=20, task="digits")
    for number in range(20):
        job.access.scripts.join(f"x{number}", "n", "", ME)
    for worker in ("one-more", None):
        with pytest.raises(
            kvps.UsageError, match=r"all its workers \(x0, x1, .* and 15 others\): join as|is for 20 workers"
        ):
            job.join(worker)


def test_a_job_id_that_is_none_is_refused(store: Store, tmp_path: Path) -> None:
    for id in ("*", "", "0123456789", "ABCDEF01"):
        with pytest.raises(kvps.InvalidName, match="is not valid"):
            store.create_job("job", model(), id=id)
    assert store.jobs() == []
