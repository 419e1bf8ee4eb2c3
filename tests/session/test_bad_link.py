"""A link on which large requests vanish and small ones pass: whoever waits for it says so, and not for ever."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
from chaos.proxy import Proxy
from helpers.harness import aggregating
from helpers.servers import free_port
from helpers.waiting import eventually
from kvps_aggregator import Aggregator
from kvps_workers import wait_reporter
from kvps_workers.wait_reporter import WaitReporter

import kvps
from kvps.connection.client import Client
from kvps.job import Job
from kvps.store import Store

CHUNKS = 5
PARAMS = {"a": np.zeros(CHUNKS << 18, np.float32)}
PATIENT: dict[str, Any] = {"worker_timeout_ms": 3_600_000, "transport": "redis", "optimizer": kvps.SGD(lr=1.0)}
NOTHING_LARGE, A_CHUNK_AT_A_TIME, NOTHING = 512 << 10, 3 << 19, 1


@contextmanager
def _link(store: Store) -> Iterator[Proxy]:
    """A proxy in front of the server."""
    proxy = Proxy({"listen": free_port(), "target": store.url.removeprefix("unix://")})
    begun: SimpleQueue[Any] = SimpleQueue()

    async def run() -> None:
        begun.put((asyncio.get_running_loop(), asyncio.current_task()))
        with suppress(asyncio.CancelledError):
            await proxy.run()

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    loop, task = begun.get()
    try:
        yield proxy
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join()


@contextmanager
def _job_over(proxy: Proxy) -> Iterator[Job]:
    """The job as who is behind that link has it."""
    with Client(f"redis://127.0.0.1:{proxy.port}?socket_timeout=0.5", patience_s=1.0) as client:
        yield Job(client, "job")


def _warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "kvps.session"]


def test_a_push_that_does_not_get_through_ends(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    ones = {"a": np.ones_like(PARAMS["a"])}
    job = store.create_job("job", PARAMS, **PATIENT)
    with _link(store) as proxy, _job_over(proxy) as remote, remote.join("w0") as session:
        session.pull()
        proxy.limit = NOTHING_LARGE
        with pytest.raises(kvps.ServerLost, match="push 1 of worker 'w0' does not get through"):
            session.push(ones)
        assert job.state().members["w0"].accepted == 0
        assert len(_warned(caplog)) == 1
        proxy.limit = 0
        with pytest.raises(kvps.WrongOrder, match="this is another gradient"):
            session.push(PARAMS)
        assert session.push(ones) == 1
        with aggregating(job):
            session.pull()
    assert np.unique(job.snapshot()[1]["a"]).tolist() == [-1.0]


@pytest.mark.slow
def test_a_push_on_a_link_that_moves_a_chunk_at_a_time_gets_through(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    """Each try brings one chunk more, and takes half of what its client is patient."""
    job = store.create_job("job", PARAMS, **PATIENT)
    with _link(store) as proxy, _job_over(proxy) as remote, remote.join("w0") as session:
        session.pull()
        proxy.limit = A_CHUNK_AT_A_TIME
        assert session.push({"a": np.ones_like(PARAMS["a"])}) == 1
        proxy.limit = 0
        with aggregating(job):
            session.pull()
    assert len(_warned(caplog)) == 1
    assert np.unique(job.snapshot()[1]["a"]).tolist() == [-1.0]


@pytest.mark.slow
def test_who_leaves_over_such_a_link_is_told(store: Store) -> None:
    """What a lossy format left out does not get through."""
    job = store.create_job("job", PARAMS, gradient_format="bf16", **PATIENT)
    with _link(store) as proxy, _job_over(proxy) as remote:
        session = remote.join("w0")
        session.pull()
        session.push({"a": np.full_like(PARAMS["a"], 0.3)})
        proxy.limit = NOTHING_LARGE
        with pytest.raises(kvps.ServerLost):
            session.leave(finished=False)
    assert job.state().members["w0"].active


@pytest.mark.slow
def test_an_aggregator_behind_such_a_link_ends(store: Store) -> None:
    job = store.create_job("job", PARAMS, **PATIENT)
    with _link(store) as proxy, _job_over(proxy) as remote, job.join("w0") as session:
        session.pull()
        session.push({"a": np.ones_like(PARAMS["a"])})
        aggregator = Aggregator(remote, threading.Event())
        aggregator.hold(at_once=True)
        proxy.limit = NOTHING_LARGE
        with pytest.raises(kvps.ServerLost):
            aggregator.run(until_finished=False)
        proxy.limit = 0
        with aggregating(job):
            session.pull()
    assert np.unique(job.snapshot()[1]["a"]).tolist() == [-1.0]


@pytest.mark.slow
def test_a_worker_whose_push_hangs_says_why(
    store: Store, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    says = "job job: w0 waits: its gradient does not get through to the server"
    monkeypatch.setattr(wait_reporter, "_PATIENCE_S", 0.2)
    store.create_job("job", PARAMS, **PATIENT)
    with _link(store) as proxy, _job_over(proxy) as remote, remote.join("w0") as session:
        session.pull()
        proxy.limit = NOTHING_LARGE
        with caplog.at_level(logging.INFO, "kvps.worker"), WaitReporter(remote, session) as watching:
            while not any(record.getMessage().startswith(says) for record in caplog.records):
                with watching.waiting(), pytest.raises(kvps.ServerLost):  # each push gives up after a second or two
                    session.push(PARAMS)
        proxy.limit = 0
        words = [record.getMessage() for record in caplog.records if record.name == "kvps.worker"]
        assert not any("at work" in word for word in words)
        session.push(PARAMS)


def test_a_worker_that_pulls_says_that_its_server_is_gone(
    store: Store, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wait_reporter, "_PATIENCE_S", 0.2)
    store.create_job("job", PARAMS, workers=2, **PATIENT)
    with _link(store) as proxy, _job_over(proxy) as remote, remote.join("w0") as session:
        session.pull()
        session.push(PARAMS)
        with caplog.at_level(logging.INFO, "kvps.worker"), WaitReporter(remote, session) as watching:
            threading.Timer(1.0, setattr, (proxy, "limit", NOTHING)).start()
            with watching.waiting(), pytest.raises(kvps.ServerLost):
                session.pull()
            assert eventually(lambda: any("no answer from" in record.getMessage() for record in caplog.records))
        assert "1 of 2 workers have joined" in caplog.records[0].getMessage()
        proxy.limit = 0
