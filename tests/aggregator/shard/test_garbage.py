"""What must not be left behind: by dead workers, by dead holders, by removed jobs, by sessions nobody ended."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import kvps_aggregator
import numpy as np
import pytest
from helpers.harness import aggregating
from helpers.waiting import eventually
from kvps_aggregator import Aggregator
from kvps_aggregator.shard import storage_redis
from kvps_aggregator.shard.garbage import dead

import kvps
from kvps import store as store_module
from kvps.arrays.digest import view
from kvps.job import Job
from kvps.store import Store
from kvps.transport.redis import RedisUpload

ONE = {"x": np.ones(4, np.float32)}
PATIENT = {"worker_timeout_ms": 60_000}
HOST = "gpu-1.a=b"


def _all(store: Store) -> set[str]:
    return {key for key in store.client.scan("*") if key != "kvps:preflight"}


def _gradients(job: Job) -> set[str]:
    return {key for key in job.access.client.scan(job.access.keys.all_bytes) if ":g:" in key}


def _put(job: Job, *keys: str) -> None:
    job.access.client.put([(key, [view(ONE["x"])]) for key in keys])


def test_what_dead_processes_left_is_swept_and_nothing_else(store: Store) -> None:
    job = store.create_job("job", ONE, workers=3, staleness=1, **PATIENT)
    aggregator = Aggregator(job, threading.Event())
    with job.join("w0") as w0, job.join(HOST) as w1, job.join("w2") as w2:
        for session in (w0, w1):
            session.pull()
            session.push(ONE)
        coming = job.access.keys.gradient(0, "w0", w0.incarnation, 2, 0)
        waits = {job.access.keys.gradient(0, w, s.incarnation, 1, 0) for w, s in (("w0", w0), (HOST, w1))}
        _put(job, coming)
        with job.join(HOST, takeover=True) as again:
            dead = [
                job.access.keys.gradient(0, HOST, w1.incarnation, 2, 0),  # never accepted, and its author is replaced
                job.access.keys.gradient(0, f"{HOST}.1-abcd", "1-abcd", 1, 0),  # nobody's
                job.access.keys.weights(0, "1.old-1-abcd", 0),  # staged by a holder that was replaced
                job.access.keys.manifest(0, "1.old-1-abcd"),
            ]
            _put(job, *dead)
            aggregator.hold()
            aggregator.sweep()
            assert not set(dead) & _all(store)
            assert _gradients(job) == waits | {coming}, "what waits and what may still be accepted stays"
            aggregator.work()
            aggregator.sweep()
            assert _gradients(job) == {coming}
            assert again.clock == 1
        assert w2.round == 0
    aggregator.sweep()
    assert _gradients(job) == set(), "w0 has left: what it sent and did not have accepted is nobody's"
    aggregator.release()


def test_a_standby_looks_for_dead_bytes_once_it_has_a_shard(store: Store) -> None:
    """It read the names of all keys of the server at each of its looks for a lease, two a second."""
    job = store.create_job("job", ONE, lease_ms=60_000, **PATIENT)
    holder, standby = Aggregator(job, threading.Event()), Aggregator(job, threading.Event())
    holder.hold()
    standby.sweep()

    def scans() -> int:
        standby.hold(at_once=True)
        standby.held.sweep_if_due()
        return int(store.client.call("INFO", "commandstats")["cmdstat_scan"]["calls"])

    before = scans()
    assert scans() == before
    holder.release()
    assert scans() > before
    standby.release()


def test_state_under_any_name_that_an_optimizer_may_give_it_is_swept() -> None:
    """Also under one with capitals, of an optimizer of the user's own."""
    names = ["w:3.1-a:0", "opt.momentum:3.1-a:0", "opt.Momentum2:3.1-a:0", "opt.past16:3.1-a:0", "opt.view:3.1-a:0"]
    assert list(dead(names, {"4.1-a"}, {}, set())) == names
    assert list(dead(names, {"3.1-a"}, {}, set())) == []


@pytest.mark.parametrize("transport", ["redis", "shm"])
def test_keys_of_another_program_in_a_jobs_slots_stay_and_stop_nothing(store: Store, raw: Any, transport: str) -> None:
    """They go when the job is removed."""
    job = store.create_job("job", ONE, worker_timeout_ms=200, transport=transport)
    slot = job.access.keys.slot(0).encode()
    odd = [b"junk", b"", b":", b"g", b"g:", b"g:w0", b"g:w0.1-a", b"g:w0.1-a:x:0", b"g:w0.1-a:1:x", b"r:w0.1-a:-1:0"]
    odd += [b"w", b"w:", b"w:1.t:x", b"w:x.t:0", b"m:nonsense", b"opt.:1.t:0", b"reserve:x", b"owner:", b"\xff\xfe"]
    odd += [b"g:w0.1-a:" + b"9" * 5000 + b":0", b"g:" + b"w" * 300 + b".1-a:1:0", b"w:1.t:0\n", "w:\u0661.t:0".encode()]
    strays = {slot + name for name in odd}
    for key in strays:
        raw.set(key, 1)
    elsewhere = [b"kvps:{job/0}:junk", b"kvps:{job/%s/x/}:w:1.t:0" % job.id.encode(), b"kvps:{job}:junk"]
    for key in elsewhere:
        raw.hset(key, "a", 1)
    if transport == "shm":
        segments = job.access.transport.segments.folder
        (segments / "junk").write_text("")
        (segments / "g:w0.1-a:x").write_text("")
    aggregator = Aggregator(job, threading.Event())
    with job.join("w0") as session:
        for version in range(1, 4):
            session.pull()
            session.push(ONE)
            aggregator.hold()
            aggregator.sweep()
            aggregator.work()
            assert job.state().version == version
    aggregator.release()
    assert strays <= set(raw.keys("*"))
    store.remove_job("job")
    assert not [key for key in raw.keys("*") if key.startswith(b"kvps:{job/" + job.id.encode())]


@pytest.mark.parametrize("limited", [False, True])
def test_dead_bytes_of_a_small_model_are_deleted_a_few_at_a_time(store: Store, limited: bool) -> None:
    """A request for each round's few keys is a tenth of the round. Where memory is limited, room is worth more."""
    store.client.call("CONFIG", "SET", "maxmemory", (1 << 30) * limited)
    job = store.create_job("job", ONE, **PATIENT)
    aggregator, left = Aggregator(job, threading.Event()), list[int]()
    aggregator.hold()
    with job.join("w0") as w0:
        for _ in range(48):
            w0.pull()
            w0.push(ONE)
            aggregator.work()
            left.append(len(_gradients(job)))
    assert max(left) == (0 if limited else storage_redis._FEW_KEYS - 1)
    assert left.count(0) == (48 if limited else 48 // storage_redis._FEW_KEYS)
    aggregator.sweep()
    assert _gradients(job) == set()
    aggregator.release()
    store.client.call("CONFIG", "SET", "maxmemory", 0)


def test_what_was_staged_in_part_is_not_swept(store: Store) -> None:
    """A server that was full in the middle of it has some of the next version's chunks, and is asked for the rest."""
    job = store.create_job("job", ONE)
    aggregator = Aggregator(job, threading.Event())
    aggregator.hold()
    (shard,) = aggregator.held.shards.values()
    begun = job.access.keys.weights(0, f"1.{shard.term}", 0)
    _put(job, begun)
    aggregator.sweep()
    assert begun in _all(store)
    aggregator.release()


def test_a_removed_job_leaves_nothing_though_a_worker_is_in_the_middle_of_a_push(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = store.create_job("job", ONE)
    sent = threading.Event()

    def end_and_lose_the_job(self: RedisUpload) -> bool:
        ended = end(self)
        if not sent.is_set():
            sent.set()
            store.remove_job("job")
            store.client.put(self._items)  # as if the connection had been slow
        return ended

    end = RedisUpload.end
    with aggregating(job), contextlib.suppress(kvps.JobNotFound), job.join("w0") as session:
        for _ in range(3):
            session.pull()
            session.push(ONE, 0.5)
        session.pull()
        monkeypatch.setattr(RedisUpload, "end", end_and_lose_the_job)
        with pytest.raises(kvps.JobNotFound, match="no job 'job'"):
            session.push(ONE, 0.25)
    assert _all(store) == set()


def test_bytes_that_land_late_are_removed_too(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    job = store.create_job("job", ONE)
    job.join("w0").leave()
    late = job.access.keys.gradient(0, "w0", "1-abcd", 1, 0)
    monkeypatch.setattr(
        store_module.time, "sleep", lambda _: None if late in sent else (_put(job, late), sent.add(late))
    )
    sent: set[str] = set()
    store.remove_job("job")
    assert sent
    assert _all(store) == set()


def test_who_left_unfinished_is_taken_up_first(store: Store) -> None:
    job = store.create_job("job", ONE, workers=3)
    job.join("gpu-box").leave(finished=False)
    with job.join() as session:
        assert session.worker == "gpu-box"


def _held_by_another(job: Job) -> None:
    term, *_ = job.access.scripts.acquire(1, "another", job.config.lease_ms, "abcd")
    job.access.scripts.own(1, term)


def test_the_last_aggregator_sweeps_behind_a_holder_that_was_killed(store: Store) -> None:
    """The job is finished, but one shard's lease is still there, and nobody is left to sweep it."""
    job = store.create_job("job", ONE, workers=1, shards=2, lease_ms=300)
    dead = [job.access.keys.gradient(shard, "w9", "1-abcd", 1, 0) for shard in range(2)]
    _put(job, *dead)
    _held_by_another(job)
    job.join("w0").leave(finished=True)
    kvps_aggregator.serve(job)
    assert _gradients(job) == set()
    assert not any(job.access.reader.holders()), "whoever comes next can have the shards at once"


def test_an_aggregator_that_is_done_does_not_wait_for_one_that_lives(store: Store) -> None:
    job = store.create_job("job", ONE, workers=1, shards=2, lease_ms=300)
    with aggregating(job, [1]):  # serves on for those who may still join
        eventually(lambda: job.access.reader.holders()[1])
        job.join("w0").leave(finished=True)
        kvps_aggregator.serve(job)
        assert [bool(holder) for holder in job.access.reader.holders()] == [False, True]
