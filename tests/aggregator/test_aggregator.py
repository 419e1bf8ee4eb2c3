"""Real processes die: the others go on, nothing is lost, nothing counts twice. `test_fail_at` has the many orders."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.harness import aggregating, check_chain, gradient, model, plain_loop, work_on
from helpers.waiting import eventually, processes_of
from kvps_aggregator import Aggregator, Outcome
from kvps_cli.prove.fault_injection import judge
from kvps_cli.supervise import Supervisor

import kvps
from kvps.job import Job
from kvps.store import Store

pytestmark = pytest.mark.usefixtures("forked")

SLOW_LEASE = {"lease_ms": 60_000, "worker_timeout_ms": 60_000}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("staleness", "data"),
    [("0", "static"), ("1", "units"), ("-1", "static")],
)
def test_up_under_fire_loses_nothing(home: Path, staleness: str, data: str) -> None:
    command = [sys.executable, "-m", "kvps", "up", "digits", "--kill-every", "1.5", "--epochs", "15", "-s", staleness]
    done = subprocess.run([*command, "--data", data, "--shards", "2"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"^(\d+) kills, (\d+) acknowledged, 0 lost, 0 twice, replay identical", done.stdout, re.MULTILINE)
    assert found, done.stdout
    assert int(found[1]) >= 2
    assert int(found[2]) >= 250
    assert processes_of(home) == []


# -- aggregators --------------------------------------------------------------------------------------------------


def _serve(store: Store, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "kvps", "aggregator", "start", "--job", "job", *arguments],
        env=os.environ | {"KVPS_REDIS_URL": store.url},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _until(process: subprocess.Popen[str], words: str) -> None:
    assert process.stdout
    seen = ""
    for line in process.stdout:
        seen += line
        if words in line:
            return
    raise AssertionError(f"it ended without {words!r}: {seen}")


@pytest.fixture
def two(store: Store) -> Iterator[tuple[Job, subprocess.Popen[str], subprocess.Popen[str]]]:
    """A job, the aggregator that holds its shards and one that stands by."""
    job = store.create_job("job", model(), shards=2, optimizer=kvps.SGD(lr=0.05), lease_ms=500)
    holder = _serve(store)
    _until(holder, "holds shard 1")
    standby = _serve(store)
    _until(standby, "stands by")
    yield job, holder, standby
    for process in (holder, standby):
        process.kill()
        process.communicate()


def _work_in_background(job: Job, rounds: int) -> threading.Thread:
    thread = threading.Thread(target=work_on, args=(job, "w0", rounds))
    thread.start()
    return thread


@pytest.mark.slow  # it starts whole commands
def test_a_standby_goes_on_where_a_killed_holder_was(two: tuple) -> None:
    job, holder, standby = two
    worker = _work_in_background(job, 60)
    assert eventually(lambda: job.state().version >= 20)
    holder.kill()
    worker.join()
    assert eventually(lambda: job.state().version == 60)
    check_chain(job)
    for name, array in plain_loop(model(), 1, 60, 0.05).items():
        np.testing.assert_array_equal(job.snapshot()[1][name], array)
    assert standby.poll() is None or standby.returncode == 0


def test_a_standby_takes_what_is_given_up_at_once(store: Store) -> None:
    """The lease would last a minute: the release rings."""
    job = store.create_job("job", model(), **SLOW_LEASE)
    first, second = Aggregator(job, threading.Event()), threading.Event()
    first.hold()
    holder = job.holders()[0]
    standby = threading.Thread(target=Aggregator(job, second).run, args=(False,))
    standby.start()
    assert eventually(lambda: store.client.call("INFO", "clients")["blocked_clients"] > 0)
    first.release()
    assert eventually(lambda: job.holders()[0] not in ("", holder))
    second.set()
    standby.join()


# -- supervised ---------------------------------------------------------------------------------------------------


@pytest.mark.slow  # it starts whole commands
def test_the_dead_children_of_a_supervisor_are_buried_at_once(store: Store) -> None:
    """Leases and timeouts are a minute: only who knows that its child is dead can be as quick."""
    config = {"workers": 2, "task": "digits", "batch_size": 32, "epochs": 3000, "optimizer": kvps.SGD(lr=0.1)}
    from kvps_workers import load_task

    job = store.create_job("job", load_task("digits").parameters(0), **config, **SLOW_LEASE)
    supervisor = Supervisor(store, "kvps up", lambda: job)
    try:
        supervisor.start("aggregator", "aggregator", "start", "--job", "job")
        for worker in ("w0", "w1"):
            supervisor.start(worker, "worker", "--job", "job", "--id", worker)
        for victim in ("w0", "aggregator", "w1", "aggregator"):
            before = job.state().version
            assert eventually(lambda v=before: job.state().version > v + 5)
            supervisor.children[victim].process.kill()
            supervisor.watch(10)
            assert supervisor.children[victim].running, "it is started again"
            if victim != "aggregator":
                assert eventually(lambda w=victim: job.state().members[w].incarnation.startswith("2-"))
        before = job.state().version
        assert eventually(lambda: job.state().version > before + 5)
    finally:
        supervisor.end()
    evicted = [
        f["worker"] for _, f in store.client.call("XRANGE", job.access.keys.commits, "-", "+") if f["kind"] == "evict"
    ]
    assert evicted == ["w0", "w1"]


@pytest.mark.slow  # it starts whole commands
def test_a_child_that_is_killed_before_it_can_do_anything_is_given_up(store: Store) -> None:
    store.create_job("job", model())
    supervisor = Supervisor(store, "kvps up", lambda: store.job("job"))
    supervisor.start("aggregator", "aggregator", "start", "--job", "job")

    def kill_again_and_again() -> None:
        for _ in range(6):
            supervisor.children["aggregator"].process.kill()
            supervisor.watch(10)

    try:
        with pytest.raises(kvps.KvpsError, match="killed 5 times in a row by signal 9 "):
            kill_again_and_again()
    finally:
        supervisor.end()


# -- members ------------------------------------------------------------------------------------------------------


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


def test_min_workers_is_not_more_than_workers(store: Store) -> None:
    with pytest.raises(kvps.InvalidSetting, match="min_workers must be a whole number from 0 to 2"):
        store.create_job("job", model(), workers=2, min_workers=3)


# -- the judge itself ---------------------------------------------------------------------------------------------


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
    raw.hdel(job.access.keys.version, "before:0") if before is None else raw.hset(
        job.access.keys.version, "before:0", before
    )
    aggregator = Aggregator(job, threading.Event())
    try:
        with pytest.raises(kvps.CorruptData, match="before:0 must be the staged name of a version"):
            aggregator.hold()
    finally:
        aggregator.release()
