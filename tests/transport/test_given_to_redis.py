"""What Redis is given of a job over shared memory, and when; readers elsewhere see that."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

import numpy as np
import pytest
from helpers.harness import aggregating, check_chain, gradient, model
from helpers.shared_memory import OVER_SHM, bits, commit_all, committed, train
from helpers.waiting import eventually
from kvps_aggregator import Aggregator
from kvps_aggregator.shard import mirror

import kvps
from kvps.job import Job
from kvps.machine import process
from kvps.store import Store

pytestmark = pytest.mark.usefixtures("seldom_mirrored")


def test_others_see_what_redis_was_given(store: Store, see_elsewhere: Callable[[str], Job]) -> None:
    job = store.create_job("job", model(), optimizer=kvps.Adam(0.05), **OVER_SHM)
    other = see_elsewhere("job")
    assert other.snapshot()[0] == 0
    with aggregating(job) as aggregator, job.join("w0") as session:
        for round_ in range(6):
            session.push(gradient(session.pull(), 0, round_))
        weights = {name: array.tobytes() for name, array in session.pull().items()}
        aggregator.held.flush()
        for round_ in range(6, 9):
            session.push(gradient(session.pull(), 0, round_))
        assert committed(job, 9)
        version, seen = other.snapshot()
        assert {name: array.tobytes() for name, array in seen.items()} == weights
        assert version == 6
        assert job.snapshot()[0] == 9
        with pytest.raises(kvps.UsageError, match=f"shared memory of {process.host()}.*--transport redis"):
            other.join("w1")
        with pytest.raises(kvps.UsageError):
            other.join("w1", takeover=True)
    # An aggregator that ends leaves all in Redis.
    assert other.snapshot()[0] == 9
    assert bits(other) == bits(job)


def test_what_was_given_in_vain_is_deleted_and_what_was_given_stays(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis refuses each version twice, in the middle, and takes it then."""
    job = store.create_job("job", model(), lease_ms=60_000, **OVER_SHM)
    aggregator = Aggregator(job, threading.Event())
    aggregator.hold()
    (shard,) = aggregator.held.shards.values()
    put = job.access.client.put
    with job.join("w0") as session:
        for round_ in range(3):
            train(session, aggregator, 1)
            for _ in range(2):
                monkeypatch.setattr(job.access.client, "put", lambda items, **_: [put(items[:1]), _full()])
                with pytest.raises(kvps.ServerFull):
                    shard.storage.flush()
            monkeypatch.setattr(job.access.client, "put", put)
            shard.storage.flush()
            shard.storage.flush()
            assert job.access.transport.safe_version(99) == round_ + 1
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
    job = store.create_job("job", model(), **OVER_SHM)
    aggregator = Aggregator(job, threading.Event())
    aggregator.hold()
    (shard,) = aggregator.held.shards.values()
    shard.storage._mirror.lets_go(7, "7.anybodys")
    shard.storage._mirror._mirrored = -1
    with pytest.raises(kvps.KvpsError, match="earlier version"):
        shard.storage.flush()
    aggregator.release()


def test_who_sleeps_while_it_finishes_deletes_nothing_of_others(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    job = store.create_job("job", model(), lease_ms=60_000, **OVER_SHM)
    first = Aggregator(job, threading.Event())
    first.hold()
    (shard,) = first.held.shards.values()
    with job.join("w0") as session:
        train(session, first, 1)
        monkeypatch.setattr(shard.storage, "close", lambda: None)
        first.held.leases.give_up(0)
        second = Aggregator(job, threading.Event())
        second.hold()
        for round_ in (1, 2):
            session.push(gradient(session.pull(), 0, round_))
            with contextlib.suppress(kvps.LeaseLost):
                shard.storage.finish()
            commit_all(second)
        assert job.state().version == 3
    assert check_chain(job) == 3
    monkeypatch.undo()
    shard.storage.close()
    for each in (first, second):
        each.release()


def test_by_time_the_last_version_gets_there_too(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when nothing is committed any more: what is not yet due is given when it is."""
    monkeypatch.setattr(mirror, "EVERY_S", 0.2)
    job = store.create_job("job", model(), **OVER_SHM)
    with aggregating(job), job.join("w0") as session:
        for round_ in range(20):
            session.push(gradient(session.pull(), 0, round_))
        assert committed(job, 20)
        assert eventually(lambda: job.access.transport.safe_version(99) == 20)

        def names() -> set[str]:
            return {key.split(":")[3] for key in store.client.scan(job.access.keys.all_bytes) if ":w:" in key}

        assert eventually(lambda: len(names()) <= 2), "older ones are deleted"
        assert job.state().names[0] in names()
