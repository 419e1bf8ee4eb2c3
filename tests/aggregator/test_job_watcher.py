"""`kvps aggregator start` without a job: the idle ones are watched together, and each is served when it wakes up."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.harness import aggregating, model
from helpers.internals import fall_silent, segments_of
from helpers.servers import running_server
from helpers.waiting import eventually
from kvps_aggregator import job_watcher
from kvps_aggregator.job_watcher import JobWatcher

import kvps
from kvps.job import Job
from kvps.store import Store

ONE = {"x": np.ones(2, np.float32)}
PLAIN = {"optimizer": kvps.SGD(lr=1.0), "transport": "redis"}


@contextmanager
def watching(store: Store, warnings: list[str] | None = None, allow: Sequence[str] = ()) -> Iterator[JobWatcher]:
    """A watcher over all jobs of the server runs inside the block; what it raises is raised behind it. Each job is
    announced once."""
    announced: list[str] = []
    with kvps.connect(store.url) as own, ThreadPoolExecutor(1) as pool:
        warn = [].append if warnings is None else warnings.append
        watcher = JobWatcher(own, warn, lambda job: announced.append(job.id), allow=allow)
        running = pool.submit(watcher.run)
        try:
            yield watcher
        finally:
            watcher.stop()
    running.result()
    assert len(announced) == len(set(announced))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job is left soon after its last worker, and looked at again soon after it could not be served."""
    monkeypatch.setattr(job_watcher, "_LIST_MS", 50)
    monkeypatch.setattr(job_watcher, "_LINGER_S", 0.2)
    monkeypatch.setattr(job_watcher, "_AGAIN_S", 0.2)
    monkeypatch.setattr(job_watcher, "_MOST_AGAIN_S", 5.0)


def _served() -> set[str]:
    """The jobs that have an aggregator in this process."""
    prefix = "kvps-serve-"
    return {thread.name.removeprefix(prefix) for thread in threading.enumerate() if thread.name.startswith(prefix)}


def _round(job: Job, worker: str = "w0", finished: bool = True) -> None:
    """One round, up to its commit."""
    session = job.join(worker)
    session.pull()
    session.push(ONE)
    version = session.version
    while job.state().version <= version:
        job.access.reader.await_change(job.state())
    session.leave(finished=finished)


# -- what idle jobs cost ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_150_idle_jobs_cost_no_more_than_one(home: Path, start: Any) -> None:
    with kvps.connect() as store:
        jobs = [store.create_job(f"job-{i}", ONE, **PLAIN) for i in range(150)]
        aggregator = start("aggregator", "start")
        aggregator.until("job job-99:")  # they are read by name
        pid = aggregator.process.pid
        assert eventually(lambda: int(store.client.call("INFO", "clients")["blocked_clients"]) == 1)
        assert len(list(Path(f"/proc/{pid}/task").iterdir())) <= 2
        names = [client["name"] for client in store.client.call("CLIENT LIST")]
        assert sum(name.startswith(f"kvps-{pid}-") for name in names) <= 2
        before, began = _commands(store), time.monotonic()
        assert eventually(lambda: _commands(store)["xread"] >= before["xread"] + 4)
        after, looks = _commands(store), (time.monotonic() - began) / 0.5 + 2
        asked = {name: after[name] - before.get(name, 0) for name in after}
        assert asked["xread"] <= looks
        assert asked.get("smembers", 0) <= looks
        assert asked.get("evalsha", 0) == 0
        assert sum(n for name, n in asked.items() if name in ("hgetall", "mget", "set", "xrevrange")) == 0
        assert not any(holder for job in jobs for holder in job.access.reader.holders())
        _round(jobs[77])
        assert eventually(lambda: jobs[77].state().finished(jobs[77].config))
        np.testing.assert_array_equal(jobs[77].snapshot()[1]["x"], np.zeros(2))
        assert eventually(lambda: not any(jobs[77].access.reader.holders()))
        assert aggregator.end() == 143


def _commands(store: Store) -> dict[str, int]:
    """How often each command was called on the server."""
    stats = store.client.call("INFO", "commandstats")
    return {name.removeprefix("cmdstat_"): int(stat["calls"]) for name, stat in stats.items()}


# -- idle, and not ------------------------------------------------------------------------------------------------


def test_a_finished_job_can_go_on(store: Store) -> None:
    job = store.create_job("a", ONE, **PLAIN)
    with watching(store):
        for version in (1, 2):
            _round(job)
            assert eventually(lambda: _served() == set())
            assert job.state().version == version


def test_what_was_left_behind_is_committed(store: Store, quick: None) -> None:
    """Nobody is active in it, but a contribution waits for a worker that has not joined yet."""
    job = store.create_job("a", ONE, workers=2, **PLAIN)
    with job.join("w0") as session:
        session.pull()
        session.push(ONE)
    with watching(store):
        assert eventually(lambda: _served() == {"a"})
        with job.join("w1") as session:
            session.pull()
            session.push(ONE)
        assert eventually(lambda: job.state().version == 1)
        assert eventually(lambda: _served() == set())
        assert job.access.reader.holders() == [""], "it was given up, and did not only expire"


def test_the_dead_are_evicted_and_the_job_is_left(store: Store, quick: None) -> None:
    job = store.create_job("a", ONE, workers=1, worker_timeout_ms=300, **PLAIN)
    with watching(store):
        session = job.join("w0")
        session.pull()
        fall_silent(session)  # as if its process had been killed
        assert eventually(lambda: job.state().members["w0"].state == "gone")
        assert eventually(lambda: _served() == set())


def test_a_restored_job_waits_for_its_workers_as_an_idle_one(store: Store, tmp_path: Path) -> None:
    job = store.create_job("a", ONE, workers=2, **PLAIN)
    with aggregating(job), job.join("w0") as first, job.join("w1") as second:
        for session in (first, second):
            session.pull()
            session.push(ONE)
        assert eventually(lambda: job.state().version == 1)
        saved = job.checkpoint()
    again = store.restore_job(saved, "again")
    assert {member.state for member in again.state().members.values()} == {"rejoining"}
    with watching(store) as watcher:
        assert eventually(lambda: {"a", "again"} <= watcher._watched.keys())
        assert _served() == set()
        with again.join("w0"):
            assert eventually(lambda: _served() == {"again"})


def test_a_job_over_shared_memory_that_is_gone_gets_it_back(store: Store, quick: None) -> None:
    """A worker could not join before, and so could not wake it up."""
    job = store.create_job("a", model(), transport="shm")
    assert segments_of(job)
    weights = job.snapshot()[1]
    with watching(store) as watcher:
        assert eventually(lambda: "a" in watcher._watched)
        segments_of(job).remove()
        assert eventually(lambda: segments_of(job) is not None and segments_of(job).here)
        with job.join("w0") as session:
            np.testing.assert_array_equal(session.pull()["W"], weights["W"])
        assert eventually(lambda: _served() == set())


# -- many jobs, and what one of them does to the others -----------------------------------------------------------


def test_a_damaged_job_harms_no_other(store: Store, quick: None) -> None:
    """Its commit log, over which all are read together, is none any more; another's entries are no JSON."""
    warnings: list[str] = []
    log, entry, good = (store.create_job(name, ONE, **PLAIN) for name in ("log", "entry", "good"))
    with watching(store, warnings) as watcher:
        assert eventually(lambda: len(watcher._watched) == 3)
        store.client.call("DEL", log.access.keys.commits)
        store.client.call("SET", log.access.keys.commits, "noon")
        store.client.call("HSET", entry.access.keys.workers, "w0", "{")
        store.client.call("XADD", entry.access.keys.commits, "*", "kind", "join")
        assert eventually(lambda: watcher._aside.keys() >= {"log"} and any("'entry'" in line for line in warnings))
        _round(good)
        store.client.call("DEL", log.access.keys.commits)
        store.client.call("XADD", log.access.keys.commits, "*", "kind", "create")
        assert eventually(lambda: "log" in watcher._watched), "once it is mended it is watched again"
        _round(log)
    assert len(warnings) <= 3, "each reason is said once"
    assert any(
        f"key {log.access.keys.commits} is a string, not a stream" in line or "WRONGTYPE" in line for line in warnings
    )


def test_damage_under_a_served_job_harms_no_other(store: Store, quick: None) -> None:
    """Their leases are renewed in one request."""
    warnings: list[str] = []
    bad, good = (store.create_job(name, ONE, lease_ms=1500, **PLAIN) for name in ("bad", "good"))
    with watching(store, warnings):
        sessions = [bad.join("w0"), good.join("w0")]
        assert eventually(lambda: all(bad.access.reader.holders() + good.access.reader.holders()))
        for key in (bad.access.keys.lease(0), bad.access.keys.term(0), bad.access.keys.heartbeat):
            store.client.call("DEL", key)
            store.client.call("RPUSH", key, "noon")
        for _ in range(4):  # more than one length of the lease
            _await_renewal(good)
        sessions[1].pull()
        sessions[1].push(ONE)
        sessions[1].pull()
        sessions[1].leave()


def test_leases_are_renewed_by_a_server_that_has_forgotten_its_scripts(store: Store) -> None:
    job = store.create_job("a", ONE, lease_ms=1500, **PLAIN)
    with watching(store), job.join("w0"):
        assert eventually(lambda: all(job.access.reader.holders()))
        (term,) = job.access.reader.terms()
        for _ in range(2):
            store.client.call("SCRIPT FLUSH")
            _await_renewal(job)
        assert job.access.reader.terms() == [term]


def _await_renewal(job: Job) -> None:
    """Wait until its lease has longer to live than a moment before."""
    left = [int(job.access.client.call("PTTL", job.access.keys.lease(0)))]

    def renewed() -> bool:
        left.append(int(job.access.client.call("PTTL", job.access.keys.lease(0))))
        return left[-1] > left[-2]

    assert eventually(renewed)


def test_a_job_that_failed_is_tried_again_and_its_reason_is_said_once(store: Store, quick: None) -> None:
    warnings: list[str] = []
    job, good = (store.create_job(name, ONE, **PLAIN) for name in ("a", "good"))
    store.client.call("DEL", job.access.keys.array(0, "w", job.state().names[0], 0))
    with watching(store, warnings) as watcher:
        job.join("w0")
        assert eventually(lambda: "a" in watcher._aside and watcher._aside["a"].rest_s > job_watcher._AGAIN_S)
        _round(good)
        assert [line.startswith("kvps: error: ") for line in warnings] == [True]
        store.remove_job("a")
        _round(store.create_job("a", ONE, **PLAIN))
        assert eventually(lambda: "a" not in watcher._aside), "what went well ends the count"


def test_a_reason_is_said_again_of_a_job_that_went_well_meanwhile(
    store: Store, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_watcher, "_MOST_AGAIN_S", 0.5)
    warnings: list[str] = []
    job = store.create_job("a", ONE, **PLAIN)
    store.client.call("SET", job.access.keys.inbox, "noon")
    with watching(store, warnings) as watcher:
        job.join("w0")
        assert eventually(lambda: warnings)
        store.client.call("DEL", job.access.keys.inbox)
        assert eventually(lambda: all(job.access.reader.holders()) and "a" not in watcher._aside)
        before = len(warnings)
        store.client.call("SET", job.access.keys.inbox, "noon")
        assert eventually(lambda: not set(warnings[:before]).isdisjoint(warnings[before:]))


def test_a_job_made_anew_within_a_moment_is_another(store: Store) -> None:
    """No look at the list of jobs comes between: what is written to the new one's log is all there is to hear."""
    with watching(store) as watcher:
        old = store.create_job("a", ONE, **PLAIN)
        assert eventually(lambda: "a" in watcher._watched)
        store.remove_job("a")
        job = store.create_job("a", {"y": np.ones(5, np.float32)}, **PLAIN)
        assert job.id != old.id
        with job.join("w0") as session:
            session.pull()
            session.push({"y": np.ones(5, np.float32)})
        assert eventually(lambda: job.state().version == 1)


# -- a restart of the server -----------------------------------------------------------------------------------


def test_a_lost_server_is_raised_once(monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    monkeypatch.setenv("KVPS_PATIENCE", "0.3")
    with ExitStack() as stack:
        with running_server() as url:
            store = stack.enter_context(kvps.connect(url))
            stack.enter_context(pytest.raises(kvps.ServerLost))
            stack.enter_context(watching(store, warnings))
            jobs = [store.create_job(name, ONE) for name in ("a", "b")]
            for job in jobs:
                job.join("w0")
            assert eventually(lambda: all(all(job.access.reader.holders()) for job in jobs))
        assert eventually(lambda: not _served()), "all aggregators have ended"
    assert warnings == []


def test_idle_jobs_get_a_new_history_before_a_worker_joins(tmp_path: Path) -> None:
    """If it only began when one has joined, that one would be cut off."""
    socket, kept = str(tmp_path / "s"), ["--appendonly", "yes", "--dir", str(tmp_path)]
    with running_server(*kept, socket=socket) as url:
        store = kvps.connect(url)
        jobs = [store.create_job(name, ONE, **PLAIN) for name in ("a", "b")]
        old = [job.state().history for job in jobs]
        warnings: list[str] = []
        watched = watching(store, warnings)
        watcher = watched.__enter__()
        assert eventually(lambda: len(watcher._watched) == 2)
    with running_server(*kept, socket=socket):
        for job, before in zip(jobs, old, strict=True):
            assert eventually(lambda job=job, before=before: job.state().history != before)
            _round(job)
            assert job.state().members["w0"].process["incarnations"] == 1, "nobody was cut off"
        assert eventually(lambda: _served() == set())
        watched.__exit__(None, None, None)
        store.close()
    assert warnings == []


# -- code of users ------------------------------------------------------------------------------------------------


def test_code_that_another_users_job_names_is_not_imported(
    store: Store, own_rules: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job is left to others with one line, and harms no other job."""
    monkeypatch.setattr(job_watcher, "_MOST_AGAIN_S", 0.5)
    settings = {"optimizer": "own_rules:Momentum:lr=1.0", "reduction": "own_rules:median", "transport": "redis"}
    job = store.create_job("theirs", ONE, **settings)
    del sys.modules["own_rules"]
    (own_rules / "own_rules.py").write_text("raise AssertionError('it was imported')\n")
    warnings: list[str] = []
    with watching(store, warnings):
        session = job.join("w0")
        session.pull()
        session.push(ONE)
        assert eventually(lambda: warnings)
        for name in ("a", "b"):
            _round(store.create_job(name, ONE, **PLAIN))
        assert (_served() & {"theirs"}, job.access.reader.holders()) == (set(), [""])
        assert "own_rules" not in sys.modules
        assert job.state().version == 0
        assert len(job.access.reader.inbox()) == 1
        session.leave(finished=False)
        store.remove_job("theirs")
        _round(store.create_job("theirs", ONE, **PLAIN))  # without code it is served
    (line,) = warnings
    assert line == (
        "job theirs is left to other aggregators: it needs code of its user. To serve it, start one with --job theirs "
        "or with --allow own_rules:Momentum --allow own_rules:median, where that code is"
    )


def test_code_that_is_allowed_is_used(store: Store, own_rules: Path) -> None:
    job = store.create_job("mine", ONE, optimizer="own_rules:Momentum:lr=1.0", transport="redis")
    with watching(store, allow=["own_rules:Momentum"]):
        _round(job)
    np.testing.assert_array_equal(job.snapshot()[1]["x"], [0, 0])
