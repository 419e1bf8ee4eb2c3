"""What a worker keeps beside the weights: it is exactly as old as the worker's clock, whatever happens."""

from __future__ import annotations

import json
import threading
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from helpers.faults import full_server
from helpers.harness import aggregating, await_version
from helpers.internals import lose_next_answer
from helpers.waiting import eventually
from kvps_aggregator import Aggregator, Outcome

import kvps
from kvps.store import Store

PARAMS = {"x": np.zeros(4, np.float32)}
GRADIENT = {"x": np.ones(4, np.float32)}
PATIENT: dict[str, Any] = {"worker_timeout_ms": 60_000, "transport": "redis"}


def step(session: kvps.Session) -> None:
    session.pull()
    session.state["done"] = session.clock + 1
    session.push(GRADIENT)


@pytest.mark.contract
def test_a_state_is_as_old_as_the_clock_of_the_copy_that_comes_back(store: Store) -> None:
    """Committed or still waiting, and whatever the copy before had not pushed. A checkpoint has what is committed."""
    job = store.create_job("job", PARAMS, staleness=7, **PATIENT)
    first = job.join("w0")
    assert first.state == {}
    with aggregating(job):
        step(first)
        step(first)
        await_version(job, 1)
        eventually(lambda: not job.access.reader.inbox(), 60)
    version, committed = job.state().version, job.checkpoint()
    assert job.states() == {"w0": {"done": 2}}
    step(first)
    first.state["done"] = 1_000  # the process dies before it has pushed that
    second = job.join("w0", takeover=True)
    assert second.clock == 3
    assert second.state == {"done": 3}
    assert job.states() == {"w0": {"done": 2}}, "nothing is committed since"
    assert job.state().version == version
    step(second)
    assert job.join("w0", takeover=True).state == {"done": 4}, "two incarnations' contributions wait"
    with aggregating(job):
        eventually(lambda: not job.access.reader.inbox(), 60)
    assert job.states() == {"w0": {"done": 4}}

    again = store.restore_job(committed, "again")
    assert again.states() == {"w0": {"done": 2}}
    with again.join("w0") as back, again.join("w1") as new:
        assert (back.clock, back.state) == (2, {"done": 2})
        assert new.state == {}
        with aggregating(again):
            step(back)
            eventually(lambda: again.states() == {"w0": {"done": 3}}, 60)


@pytest.mark.contract
def test_a_checkpoints_file_has_the_states(store: Store, tmp_path: Any) -> None:
    job = store.create_job("job", PARAMS, **PATIENT)
    with aggregating(job), job.join("w0") as session:
        session.pull()
        session.state = {"epoch": 3, "order": [2, 0, 1], "rng": "x" * 60_000}
        session.push(GRADIENT)
        await_version(job, 1)
        job.checkpoint().write(tmp_path / "c.safetensors")
    again = store.restore_job(kvps.Checkpoint.load(tmp_path / "c.safetensors"), "again")
    assert again.states() == {"w0": {"epoch": 3, "order": [2, 0, 1], "rng": "x" * 60_000}}
    assert again.join("w0").state["epoch"] == 3


@pytest.mark.contract
def test_a_push_whose_reply_was_lost_brings_its_state_once(store: Store) -> None:
    job, session = _with_a_state(store)
    lose_next_answer()
    with pytest.raises(kvps.ServerLost):
        session.push(GRADIENT)
    session.state["more"] = "what came later travels with the next push"
    session.push(GRADIENT)
    _is_there_once(job, session)
    step(session)
    assert job.join("w0", takeover=True).state.keys() == {"done", "more"}


def test_a_push_that_a_full_server_refused_brings_its_state_once(store: Store) -> None:
    job, session = _with_a_state(store)
    with full_server(store), pytest.raises(kvps.ServerFull):
        session.push(GRADIENT)
    session.push(GRADIENT)
    _is_there_once(job, session)


def _with_a_state(store: Store) -> tuple[kvps.Job, kvps.Session]:
    """Return a worker that is about to push, and has a state."""
    job = store.create_job("job", PARAMS, staleness=7, **PATIENT)
    session = job.join("w0")
    session.pull()
    session.state["done"] = 1
    return job, session


def _is_there_once(job: kvps.Job, session: kvps.Session) -> None:
    states = job.access.client.call("HGETALL", job.access.keys.states)
    assert states == {"w0 1": '{"done":1}'}


@pytest.mark.contract
def test_the_state_of_what_is_rejected_comes_with_the_workers_next_contribution(store: Store) -> None:
    """It was sent, and has not changed since. Another incarnation goes on from what is committed."""
    job = store.create_job("job", PARAMS, staleness=7, **PATIENT)
    session = job.join("w0")
    aggregator = Aggregator(job, threading.Event())
    aggregator.hold()

    def reject_last(*, then_commits: int) -> None:
        plan = job.access.scripts.plan().plan
        assert plan
        job.access.scripts.reject(0, job.access.reader.terms()[0], plan, plan.contributions[-1], "for a test")
        while aggregator.work() is not Outcome.IDLE:
            pass
        assert job.state().clock == {"w0": then_commits}

    step(session)
    session.pull()
    session.state["epoch"] = 1
    session.push(GRADIENT)
    reject_last(then_commits=1)
    assert job.states() == {"w0": {"done": 1}}
    session.pull()
    session.push(GRADIENT)
    while aggregator.work() is not Outcome.IDLE:
        pass
    assert (job.state().clock, job.states()) == ({"w0": 2}, {"w0": {"done": 1, "epoch": 1}})

    session.state["epoch"] = 2
    session.pull()
    session.push(GRADIENT)
    reject_last(then_commits=2)
    again = job.join("w0", takeover=True)
    assert (again.clock, again.state) == (2, {"done": 1, "epoch": 1})
    again.pull()
    again.push(GRADIENT)
    while aggregator.work() is not Outcome.IDLE:
        pass
    assert (job.state().clock, job.states()) == ({"w0": 3}, {"w0": {"done": 1, "epoch": 1}})
    aggregator.release()


@pytest.mark.contract
def test_a_state_is_as_old_as_its_clock_where_a_later_contribution_is_committed_first(store: Store) -> None:
    """Rounds of units: a unit of the open round comes back when its worker has pushed one of the next."""
    settings: dict[str, Any] = {"staleness": 1, "units": 8, "units_per_round": 2}
    job = store.create_job("job", PARAMS, **settings, **PATIENT)
    gone, session = job.join("w1"), job.join("w0")
    assert (session.next_unit(), gone.next_unit()) == (0, 1)
    step(session)
    assert session.next_unit() == 2
    step(session)
    gone.leave(finished=False)
    assert session.next_unit() == 1
    step(session)
    with aggregating(job):
        await_version(job, 1)
    made = job.checkpoint()
    assert made.clock["w0"] == 2
    with store.restore_job(made, "again").join("w0") as back:
        assert (back.clock, back.state) == (2, {"done": 2})
    assert session.next_unit() == 3
    step(session)
    with aggregating(job):
        await_version(job, 2)
    assert job.states() == {"w0": {"done": 4}}


@pytest.mark.contract
def test_only_what_has_changed_travels(store: Store) -> None:
    job = store.create_job("job", PARAMS, staleness=7, **PATIENT)
    session = job.join("w0")
    step(session)
    session.pull()
    session.push(GRADIENT)
    assert len(job.access.client.call("HKEYS", job.access.keys.states)) == 1
    assert job.join("w0", takeover=True).state == {"done": 1}


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ([], "state must be a dict"),
        (np.ones(2), "state must be a dict"),
        ({"a": object()}, "JSON can hold"),
        ({1: 2}, "strings as keys"),
        ({"a": (1, 2)}, "lists for tuples"),
        ({"a": float("nan")}, "what JSON can hold: .* not JSON compliant"),
        ({"a": float("inf")}, "what JSON can hold: .* not JSON compliant"),
        ({"a": "x" * 70_000}, r"has 70,008 bytes as JSON, and may have 65,536"),
    ],
)
@pytest.mark.contract
def test_a_state_that_cannot_travel_is_refused_and_nothing_is_pushed(store: Store, state: Any, said: str) -> None:
    job = store.create_job("job", PARAMS, **PATIENT)
    session = job.join("w0")
    session.pull()
    session.state = state
    with pytest.raises(kvps.UsageError, match=said):
        session.push(GRADIENT)
    assert not job.access.reader.inbox()
    session.state = {"a": 1}
    assert session.push(GRADIENT) == 1


def test_a_round_that_nobody_has_pushed_keeps_no_server_busy(store: Store) -> None:
    """A worker may write its own entry: a script that counted down from there would never end."""
    job = store.create_job("job", PARAMS, staleness=7, **PATIENT)
    step(job.join("w0"))
    keys, client = job.access.keys, job.access.client
    entry = json.loads(client.call("HGET", keys.workers, "w0"))
    for round_ in (2**53, 10**300):
        client.call("HSET", keys.workers, "w0", json.dumps(entry | {"round": round_}))
        with suppress(kvps.KvpsError):
            job.join("w0", takeover=True)
        assert client.call("PING")
