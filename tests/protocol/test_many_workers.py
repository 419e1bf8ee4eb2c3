"""What a worker costs does not grow with the number of workers: counted in bytes, commands, bells; not in seconds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from helpers.harness import aggregating, check_chain

import kvps
from kvps.job import Job
from kvps.session.session import Session
from kvps.store import Store

pytestmark = pytest.mark.contract

TINY = {"x": np.zeros(8, np.float32)}
ROUNDS = 5
ME = {"host": "here", "pid": 1, "start": "", "space": "", "device": "cpu"}


@contextmanager
def _sessions(job: Job, number: int) -> Iterator[list[Session]]:
    """So many sessions of one thread, which leave at the end."""
    sessions = [job.join(f"w{i}") for i in range(number)]
    try:
        yield sessions
    finally:
        for session in sessions:
            session.leave()


def _bytes_sent(store: Store) -> int:
    return sum(store.client.on_masters(lambda server: int(server.call("INFO", "stats")["total_net_output_bytes"])))


def _bytes_a_contribution(store: Store, workers: int, staleness: int) -> float:
    job = store.create_job(
        f"job{workers}", TINY, workers=workers, staleness=staleness, worker_timeout_ms=3_600_000, lease_ms=3_600_000
    )
    with aggregating(job), _sessions(job, workers) as sessions:
        before = _bytes_sent(store)
        for _ in range(ROUNDS):
            for session in sessions:
                session.pull()
                session.push(TINY)
        for session in sessions:
            session.pull()
        sent = _bytes_sent(store) - before
    assert check_chain(job) >= ROUNDS
    return sent / (ROUNDS * workers)


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 2])
def test_the_bytes_of_a_contribution_do_not_grow_with_the_workers(store: Store, staleness: int) -> None:
    """With every look of a worker at every other, 64 cost ten times as much as 4."""
    few, many = (_bytes_a_contribution(store, workers, staleness) for workers in (4, 64))
    assert many < 2 * few, (many, few)


def test_a_worker_that_waits_is_woken_by_its_turn_and_not_by_others_that_come_and_go(store: Store) -> None:
    """Who waits in BSP for the last of three is not rung for while a hundred others join and leave."""
    job = store.create_job("job", TINY, workers=2, staleness=0, units=1000)
    for name in ("w0", "w1"):
        job.access.scripts.join(name, "n", "", ME)
    before = job.access.client.call("XLEN", job.access.keys.turns)
    for number in range(100):
        job.access.scripts.join(f"x{number}", "n", "", ME)
        job.access.scripts.leave(f"x{number}", "1-n", False)
    assert job.access.client.call("XLEN", job.access.keys.turns) == before
    assert job.access.client.call("XLEN", job.access.keys.commits) >= 200, "the log has them all"


def test_a_plan_of_many_that_wait_is_bounded_where_nobody_waits_for_a_round(store: Store) -> None:
    """A commit of all that 300 workers had waiting in SSP would keep the server from others for as long."""
    job = store.create_job("job", TINY, workers=1, staleness=2)
    history = job.state().history
    for number in range(300):
        job.access.scripts.join(f"x{number}", "n", "", ME)
        for seq in (1, 2):
            job.access.scripts.push(f"x{number}", "1-n", seq, 0, 0, "-", history)
    plan = job.access.scripts.plan().plan
    assert plan
    assert len(plan.contributions) == 512
    term = job.access.scripts.acquire(0, "holder", 60_000, "n1").term
    assert job.access.scripts.ready(0, term, plan, "0" * 16).flipped
    rest = job.access.scripts.plan().plan
    assert rest
    assert len(rest.contributions) == 88
    assert {c.text for c in rest.contributions}.isdisjoint(c.text for c in plan.contributions)


def test_a_version_may_have_more_contributions_than_lua_passes_to_a_call(store: Store) -> None:
    """One worker has left since, and is gone."""
    workers = 1_001
    job = store.create_job("job", TINY, workers=1, quorum=1, units=9_999)
    scripts, history = job.access.scripts, job.state().history
    for number in range(workers):
        scripts.join(f"x{number}", "n", "", ME)
        scripts.push(f"x{number}", "1-n", 1, 0, 0, "-", history, unit=scripts.next_unit(f"x{number}", "1-n").unit)
    scripts.leave("x1000", "1-n", True)
    term, plan = scripts.acquire(0, "holder", 60_000, "n1").term, scripts.plan().plan
    assert plan
    assert scripts.ready(0, term, plan, "0" * 16).flipped
    state = job.state()
    assert state.clock == {f"x{number}": 1 for number in range(workers)}
    assert {m.round for m in state.members.values()} == {1}
    assert [m.worker for m in state.members.values() if m.state == "gone"] == ["x1000"]
    assert dict(state.units) == {"next": str(workers), "done": str(workers)}


def _version_of(store: Store, shards: int) -> tuple[float, float]:
    """Return the commands, and the bytes sent, a shard: for a version whose norm is asked for by the holder of each."""
    params, settings = {"x": np.zeros(shards, np.float32)}, {"shards": shards, "worker_timeout_ms": 3_600_000}
    job = store.create_job(f"job{shards}", params, optimizer=kvps.SGD(clip_norm=1.0), **settings)
    scripts = job.access.scripts
    me = scripts.join("w0", "n", "", ME)
    scripts.push("w0", me.incarnation, 1, 0, 1, ",".join(["0"] * shards), job.state().history)
    terms = [scripts.acquire(shard, "holder", 3_600_000, f"n{shard}").term for shard in range(shards)]
    plan = scripts.plan().plan
    assert plan
    commands, sent = _commands(store), _bytes_sent(store)
    sums = [scripts.norm(plan, {shard: (1.0,)}) for shard in range(shards)]
    flipped = [scripts.ready(shard, term, plan, "d").flipped for shard, term in enumerate(terms)]
    commands, sent = _commands(store) - commands, _bytes_sent(store) - sent
    assert sums[:-1] == [{}] * (shards - 1)
    assert sums[-1] == dict.fromkeys(range(shards), (1.0,))
    assert flipped == [*[False] * (shards - 1), True]
    assert job.state().names == tuple(f"1.{term}" for term in terms)
    return commands / shards, sent / shards


def _commands(store: Store) -> int:
    """Return how many commands the server has run, those in scripts too."""
    stats = store.client.on_masters(lambda server: server.call("INFO", "commandstats"))
    return sum(int(stat["calls"]) for server in stats for stat in server.values())


def test_what_a_version_costs_a_shard_does_not_grow_with_the_shards(store: Store) -> None:
    """Where each shard's call looked at all of them, 1,000 shards took two million commands a version."""
    (few_commands, few_bytes), (many_commands, many_bytes) = (_version_of(store, shards) for shards in (10, 100))
    assert many_commands <= few_commands, (many_commands, few_commands)
    assert many_bytes < 1.5 * few_bytes, (many_bytes, few_bytes)


def test_workers_that_name_no_id_get_one_each_and_the_first_that_is_free(store: Store) -> None:
    job = store.create_job("job", TINY, workers=20, worker_timeout_ms=3_600_000)
    with _sessions(job, 3), job.join() as fourth:
        assert fourth.worker == "w3"
        assert job.access.scripts.reserve() == "w4", "by one that never came"
        others = [job.join() for _ in range(16)]
        assert sorted(s.worker for s in others) == sorted(f"w{i}" for i in range(4, 20)), "it is found in the end"
        for other in others:
            other.leave()
