"""Workers of one host pull a version from Redis once, and each gets the same bits as if it had pulled alone."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.harness import Params, aggregating, await_version, gradient, large_model, staleness_used, work

import kvps
from kvps.arrays.layout import DTYPE, Array
from kvps.connection.client import Client
from kvps.job import Job
from kvps.session.session import Session
from kvps.store import Store
from kvps.transport import host_pull
from kvps.transport.host_copy import HostCopy, Progress, Read
from kvps.transport.host_pull import HostPull
from kvps.transport.version_reader import VersionReader
from kvps.transport.weight_reader import PullRequest, Weights

WORKERS = 3
ROUNDS = 6
ITEMS = 300_000
ID = "0123abcd.workers"

pytestmark = pytest.mark.usefixtures("runtime", "forked")

_spawn = multiprocessing.get_context("spawn")


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take every server for one on another host."""
    monkeypatch.setattr(host_pull, "is_far", lambda client: True)


@pytest.fixture
def pulled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The names of each version that a worker's pull reads from Redis, as often as one does."""
    names: list[tuple[str, ...]] = []
    read = VersionReader.read

    def counted(self: VersionReader, request: PullRequest) -> Weights:
        names.append(request.state.names)
        return read(self, request)

    monkeypatch.setattr(VersionReader, "read", counted)
    return names


def _sent(store: Store) -> int:
    return sum(int(node.call("INFO", "stats")["total_net_output_bytes"]) for node in _nodes(store))


def _nodes(store: Store) -> list[Client]:
    found: list[Client] = []
    store.client.on_masters(found.append)
    return found


def _step(session: Session, params: Params, round_: int) -> Params:
    return gradient(params, int(session.worker[1:]), round_)


def _trained(store: Store, job: Job) -> tuple[dict[str, Array], int]:
    """Train for some rounds. Return the weights, and the bytes that Redis sent."""
    before = _sent(store)
    with aggregating(job):
        work(job, ROUNDS, _step, WORKERS)
        await_version(job, ROUNDS)
        sent = _sent(store) - before
    return job.snapshot()[1], sent


@pytest.mark.slow
def test_weights_are_bit_for_bit_those_of_separate_pulls(
    store: Store, monkeypatch: pytest.MonkeyPatch, pulled: list[tuple[str, ...]]
) -> None:
    found, reads, sent = [], [], []
    for far in (False, True):
        monkeypatch.setattr(host_pull, "is_far", lambda client, far=far: far)
        settings = {"workers": WORKERS, "weight_format": "bf16", "transport": "redis"}
        job = store.create_job(f"job-{far}", large_model(), **settings)
        pulled.clear()
        weights, bytes_ = _trained(store, job)
        found.append(weights)
        reads.append(len(pulled))
        sent.append(bytes_)
        store.remove_job(job.name)
    for name, weights in found[0].items():
        assert weights.tobytes() == found[1][name].tobytes()
    assert reads[0] == WORKERS * ROUNDS
    assert reads[1] <= ROUNDS + 2, "one read a version, and at most one more for each worker that found nobody yet"
    nbytes = sum(array.nbytes for array in found[0].values()) // 2
    spared = (sent[0] - sent[1]) / nbytes
    assert spared > 0.9 * (reads[0] - reads[1]), "Redis sent so many pulls less"


@pytest.mark.usefixtures("far")
@pytest.mark.parametrize("prefetch", [False, True])
def test_the_bound_of_ssp_holds(store: Store, prefetch: bool) -> None:
    job = store.create_job("job", large_model(), workers=WORKERS, staleness=2, transport="redis")

    def run(number: int) -> None:
        with job.join(f"w{number}", prefetch=prefetch) as session:
            for round_ in range(ROUNDS):
                params = session.pull()
                time.sleep(0.02 * number)
                session.push(_step(session, params, round_))

    with aggregating(job), ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(run, range(WORKERS)))
        await_version(job, 1)
    assert staleness_used(job, WORKERS) <= 2


@pytest.mark.usefixtures("far")
def test_who_is_alone_makes_no_copy(store: Store, runtime: Path) -> None:
    job = store.create_job("job", large_model(), transport="redis")
    with aggregating(job):
        work(job, 3, _step, 1)
    assert not list((runtime / "copies").iterdir())


def test_on_one_host_nothing_is_shared(store: Store, runtime: Path) -> None:
    job = store.create_job("job", large_model(), workers=WORKERS, transport="redis")
    _trained(store, job)
    assert not [path for path in runtime.glob("copies/*") if ".workers-" in path.name]


def _victim(url: str, home: str, number: int, reading: Event) -> None:
    """Pull, and send oneself the signal in the middle of the read, half a second after its begin."""
    os.environ["KVPS_RUNTIME_DIR"] = home
    host_pull.is_far = lambda client: True
    read = VersionReader.read

    def halted(self: VersionReader, request: PullRequest) -> Weights:
        def some(start: int, values: Array) -> None:
            assert request.arrived
            request.arrived(start, values)
            if not reading.is_set():
                reading.set()
                time.sleep(0.5)
                os.kill(os.getpid(), number)

        return read(self, request._replace(arrived=some))

    VersionReader.read = halted  # type: ignore[method-assign]
    with kvps.connect(url) as store:
        store.job("job").join("victim").pull()


@pytest.mark.slow
@pytest.mark.usefixtures("far")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_one_that_ends_or_halts_in_the_middle_holds_up_nobody(store: Store, runtime: Path, number: int) -> None:
    start = large_model()
    job = store.create_job("job", start, staleness=-1, transport="redis")
    reading = _spawn.Event()
    victim = _spawn.Process(target=_victim, args=(store.url, str(runtime), number, reading))
    with aggregating(job), job.join("w0") as first, job.join("w1") as second:
        victim.start()
        assert reading.wait(120)
        for session in (first, second):
            weights = session.pull()
            for name, value in start.items():
                assert np.array_equal(weights[name], value)
        assert victim.pid
        os.kill(victim.pid, signal.SIGKILL)
        victim.join()
        for round_ in range(2):
            for session in (first, second):
                session.push(_step(session, session.pull(), round_))


def _constant(version: int, reads: list[int]) -> Read:
    def read(flat: Array, progress: Progress) -> tuple[int, str]:
        flat.fill(version)
        reads.append(version)
        return version, f"{version}.term"

    return read


def test_nobody_waits_for_the_read_of_another_version(runtime: Path) -> None:
    """And who waits for a read that ends without the version reads Redis itself."""
    one, other, third = (HostCopy(ID, ITEMS) for _ in range(3))
    assert not one.enter(), "it is alone"
    assert other.enter()
    assert third.enter()
    reads: list[int] = []
    reading, over = threading.Event(), threading.Event()

    def slow(flat: Array, progress: Progress) -> tuple[int, str]:
        reading.set()
        while not over.wait(0.1):
            progress()
        return 9, "9.term"

    thread = threading.Thread(target=one.exactly, args=("1.term", slow))
    thread.start()
    assert reading.wait(120)
    assert other.exactly("2.term", _constant(2, reads)) is None
    threading.Timer(1.5, over.set).start()
    assert third.exactly("1.term", _constant(1, reads)) is None
    assert over.is_set(), "it waited"
    thread.join()
    assert not reads, "both read Redis on their own"
    assert other.exactly("3.term", _constant(3, reads))
    found = third.exactly("3.term", _constant(3, reads))
    assert found
    assert (found[1] == 3).all()
    assert reads == [3]


def test_who_may_not_open_the_copy_asks_for_none_again(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = HostCopy(ID, ITEMS), HostCopy(ID, ITEMS)
    assert not one.enter()
    assert other.enter()
    reads: list[int] = []
    assert one.exactly("1.term", _constant(1, reads))
    opened = os.open

    def refused(path: Any, *arguments: Any, **named: Any) -> int:
        if str(path).startswith("/proc/"):
            raise PermissionError(path)
        return opened(path, *arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refused)
        other.exactly("1.term", _constant(1, reads))
    assert other.exactly("2.term", _constant(2, reads)) is None
    assert 2 not in reads
    assert not one.enter(), "it makes no copies for the other one"


@pytest.mark.usefixtures("far")
def test_parts_arrive_at_who_reads_and_at_who_copies(store: Store, pulled: list[tuple[str, ...]]) -> None:
    """A device takes what arrives: all of it, in parts."""
    params = large_model()
    job = store.create_job("job", params, transport="redis")
    flat = np.concatenate([job.snapshot()[1][p.name].ravel() for p in job.layout.parameters])
    pulls = [HostPull(job.access, job.access.reader) for _ in range(2)]
    pulled.clear()
    for pull in pulls:
        seen, got = np.full(flat.size, np.nan, DTYPE), np.empty(flat.size, DTYPE)
        parts = []

        def arrived(start: int, part: Array, seen: Array = seen, parts: list[int] = parts) -> None:
            seen[start : start + part.size] = part
            parts.append(start)

        latest = job.access.reader.round_state
        assert pull.read(PullRequest(latest(), 0, latest, got, arrived)).version == 0
        assert len(parts) > 1
        assert np.array_equal(seen, flat)
        assert np.array_equal(got, flat)
    assert len(pulled) == 1


def test_members_find_each_other_again_after_the_file_was_deleted(runtime: Path) -> None:
    one, other = HostCopy(ID, ITEMS), HostCopy(ID, ITEMS)
    one.enter()
    assert other.enter()
    (runtime / "copies" / ID).unlink()
    assert not one.enter()
    assert other.enter()
    assert one.enter()
    del other
    assert not one.enter()
