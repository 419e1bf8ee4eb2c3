"""Aggregators that take over from each other, wait, and judge what was lost. tests/chaos has the many orders."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.harness import aggregating, gradient, model
from helpers.waiting import eventually
from kvps_aggregator import Aggregator, Outcome
from kvps_cli.prove.fault_injection import judge

import kvps
from kvps.store import Store

SLOW_LEASE = {"lease_ms": 60_000, "worker_timeout_ms": 60_000}


def test_a_standby_takes_what_is_given_up_at_once(store: Store) -> None:
    """The lease would last a minute: the release rings."""
    job = store.create_job("job", model(), **SLOW_LEASE)
    first, second = Aggregator(job, threading.Event()), threading.Event()
    first.hold()
    holder = job.access.reader.holders()[0]
    standby = threading.Thread(target=Aggregator(job, second).run, args=(False,))
    standby.start()
    assert eventually(lambda: store.client.call("INFO", "clients")["blocked_clients"] > 0)
    first.release()
    assert eventually(lambda: job.access.reader.holders()[0] not in ("", holder))
    second.set()
    standby.join()


def test_a_standby_says_once_who_holds_the_shards(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    """Also while it says of its own shards what they wait for."""
    caplog.set_level("INFO", "kvps.commit")
    job = store.create_job("job", {"x": np.zeros(12, np.float32)}, workers=2, shards=12, **SLOW_LEASE)
    first, second = Aggregator(job, threading.Event(), list(range(10))), Aggregator(job, threading.Event())
    first.hold()
    for _ in range(3):
        second.hold(at_once=True)
        second.work()
    holds = f"job job: stands by: {job.access.reader.holders()[0]} holds shard 0, 1, 2, 3, 4 and 5 others"
    assert [record.message for record in caplog.records] == [holds, "job job: waits for 2 workers to join"]
    first.release()
    second.release()


def test_a_job_pauses_below_its_least_number_of_workers(store: Store) -> None:
    job = store.create_job("job", model(), workers=2, min_workers=2, **SLOW_LEASE)
    aggregator = Aggregator(job, threading.Event())
    w0, w1 = job.join("w0"), job.join("w1")
    aggregator.hold()
    for session in (w0, w1):
        session.push(gradient(session.pull(), session.rank, 0))
    assert aggregator.work() is Outcome.COMMITTED
    w1.leave(finished=False)
    w0.push(gradient(w0.pull(), 0, 1))
    assert aggregator.work() is Outcome.IDLE
    with job.join("w1") as again:
        again.push(gradient(again.pull(), 1, 1))
        assert aggregator.work() is Outcome.COMMITTED
    aggregator.release()


def test_the_judge_sees_what_is_lost_and_what_counts_twice(store: Store, tmp_path: Path) -> None:
    job = store.create_job("job", model())
    with aggregating(job), job.join("w0") as session:
        for round_ in range(3):
            session.push(gradient(session.pull(), 0, round_))
        assert eventually(lambda: job.state().version == 3)
        incarnation = session.incarnation
    file = tmp_path / "w0"
    file.write_text("".join(f"w0 {incarnation} {n}\n" for n in (1, 2, 3)) + "w0 1-cut")
    assert judge([file], job) == (3, 0, 0)
    file.write_text(f"w0 {incarnation} 3\nw0 {incarnation} 4\nw0 1-other 1\n")
    assert judge([file], job) == (3, 2, 0)
    entries = store.client.call("XRANGE", job.access.keys.commits, "-", "+")
    commit = next(fields for _, fields in entries if fields["kind"] == "commit")
    store.client.call("XADD", job.access.keys.commits, "*", *[part for pair in commit.items() for part in pair])
    assert judge([file], job).twice == 1


@pytest.mark.parametrize("before", [None, "../../x", "0.x y"])
def test_an_aggregator_deletes_only_what_has_the_name_of_a_version(store: Store, raw: Any, before: str | None) -> None:
    """The name of the version before is that of bytes which it deletes."""
    job = store.create_job("a", {"x": np.ones(2, np.float32)})
    raw.hdel(job.access.keys.version, "before:0")
    if before is not None:
        raw.hset(job.access.keys.version, "before:0", before)
    aggregator = Aggregator(job, threading.Event())
    with pytest.raises(kvps.CorruptData, match="before:0 must be the staged name of a version"):
        aggregator.hold()
    aggregator.release()
