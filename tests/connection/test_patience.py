"""How long a server that does not answer is waited for, what is said meanwhile, and that training goes on behind it."""

from __future__ import annotations

import logging
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import redis
from helpers.faults import MortalServer, halted_server
from helpers.harness import aggregating, check_chain, gradient, work
from helpers.servers import private_directory, running_server
from helpers.waiting import eventually
from kvps_cli import app
from typer.testing import CliRunner

import kvps
from kvps.connection import patience
from kvps.connection.client import Client
from kvps.connection.patience import Retries, patience_s
from kvps.session.session import Session

TINY = {"x": np.zeros(2, np.float32)}


@pytest.fixture(autouse=True)
def said_soon(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """What is waited for is said every 0.1 s, and not every 10."""
    monkeypatch.setattr(patience, "_SAY_EVERY_S", 0.1)
    caplog.set_level(logging.WARNING, "kvps.connection")


@pytest.mark.parametrize(("text", "seconds"), [("", 60), ("5", 5), ("0.5", 0.5), ("0", float("inf"))])
def test_the_environment_says_how_long(monkeypatch: pytest.MonkeyPatch, text: str, seconds: float) -> None:
    monkeypatch.setenv("KVPS_PATIENCE", text)
    assert patience_s() == seconds


@pytest.mark.parametrize("text", ["-1", "nan", "inf", "soon"])
def test_what_is_no_patience_is_said(monkeypatch: pytest.MonkeyPatch, server_url: str, text: str) -> None:
    monkeypatch.setenv("KVPS_PATIENCE", text)
    with pytest.raises(kvps.InvalidSetting, match="KVPS_PATIENCE is a number of seconds, or 0 for no limit"):
        kvps.connect(server_url)


def test_a_silent_server_is_waited_for_as_long_as_patience_says(
    server_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By a process that uses it, and by one that is started meanwhile."""
    monkeypatch.setenv("KVPS_PATIENCE", "0.6")
    hurried = f"{server_url}?socket_timeout=0.1"
    with kvps.connect(server_url) as store, kvps.connect(hurried) as other:
        with halted_server(store.client):
            with pytest.raises(kvps.ServerLost, match=r"no answer from unix://\S+ for 0\.6 s"):
                other.client.call("PING")
            with pytest.raises(kvps.NoServer, match="no Redis server answers"):
                kvps.connect(hurried)
            done = CliRunner().invoke(app, ["jobs", "--redis", hurried, "--patience", "0.3"])
            assert isinstance(done.exception, kvps.NoServer)
            lines = list(caplog.messages)
        assert other.client.call("PING")
    waits = re.escape(f"waits for Redis at {hurried}: no answer for ")
    assert all(re.fullmatch(rf"{waits}\d s \(of 0\.[36]\)", line) for line in lines)
    assert {line[-4:-1] for line in lines} == {"0.6", "0.3"}


def test_without_a_limit_it_is_waited_for_until_the_process_ends(
    server_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("KVPS_PATIENCE", "0")
    monkeypatch.setattr(patience, "LAST_S", 0.1)
    monkeypatch.setattr(patience, "ending", threading.Event())
    with kvps.connect(server_url) as store, kvps.connect(f"{server_url}?socket_timeout=0.1") as other:
        with halted_server(store.client):
            ending = threading.Timer(0.8, patience.ending.set)
            ending.start()
            with pytest.raises(kvps.ServerLost, match=r"no answer from \S+ for \d+ s"):
                other.client.call("PING")
            ending.join()
        store.client.call("PING")
    assert all(line.endswith(" s") for line in caplog.messages), "no limit is named"


@pytest.mark.contract
def test_a_silence_longer_than_every_timeout_evicts_nobody(
    store: kvps.Store, caplog: pytest.LogCaptureFixture, transport: str
) -> None:
    """Requests time out, leases end, and no heartbeat arrives: the server was away, and no worker was."""
    with kvps.connect(f"{store.url}?socket_timeout=0.3") as through:
        settings = {"worker_timeout_ms": 1200, "lease_ms": 900, "workers": 2, "transport": transport}
        job = through.create_job("away", TINY, optimizer=kvps.SGD(lr=0.1), **settings)

        def step(session: Session, params: dict[str, np.ndarray], round_: int) -> dict[str, np.ndarray]:
            if (session.rank, round_) == (0, 5):
                store.client.on_masters(lambda node: node.call("CLIENT", "PAUSE", 1500, "ALL"))
            return gradient(params, session.rank, round_)

        with aggregating(job):
            work(job, 10, step, workers=2)
            assert job.await_finished()
        assert job.state().clock == {"w0": 10, "w1": 10}
        assert {member.process["incarnations"] for member in job.state().members.values()} == {1}
        check_chain(job)
    assert [line for line in caplog.messages if line.startswith(f"waits for Redis at {through.url}: no answer for ")]
    assert [line for line in caplog.messages if re.search(r"answers again after \d s", line)]


def test_a_server_that_loads_is_waited_for_longer_than_patience(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It answers: the line says that it loads, and how far it is."""
    monkeypatch.setenv("KVPS_PATIENCE", "0.8")
    with (
        private_directory() as folder,
        MortalServer(folder, "--appendonly", "no") as server,
        Client(server.url) as client,
        ThreadPoolExecutor(2) as threads,
    ):
        client.each([("SET", f"key:{n}", "x" * 100) for n in range(2000)])
        client.call("SAVE")
        server.kill()
        starting = threads.submit(
            server.start, "--key-load-delay", "1000", "--loading-process-events-interval-bytes", "1024"
        )
        assert eventually(lambda: _loads(server.url))
        used = threads.submit(client.call, "GET", "key:7")
        with kvps.connect(server.url) as store:
            assert store.client.call("GET", "key:8") == used.result() == "x" * 100
        starting.result()
    assert re.search(r": it loads its data, \d+% so far and about \d+ s left, for \d s$", caplog.messages[0])


def _loads(url: str) -> bool:
    with redis.Redis.from_url(url, retry=None) as client:
        try:
            client.ping()
        except redis.BusyLoadingError:
            return True
        except redis.ConnectionError:
            return False
    raise AssertionError("it has loaded its data too soon")


def test_progress_begins_the_time_anew() -> None:
    retries = Retries(0.2)
    for _ in range(25):  # of 10 ms each
        retries.progress()
        assert retries.pause(lambda: "")
    while retries.pause(lambda: ""):
        pass
    assert retries.pause(lambda: "", answers=True)


def test_a_full_server_is_waited_for_by_that_name(caplog: pytest.LogCaptureFixture) -> None:
    with running_server() as url, Client(url, patience_s=0.7) as client:
        client.call("CONFIG", "SET", "maxmemory", 1)
        with pytest.raises(kvps.ServerFull):
            client.call("SET", "x", "y")
    assert re.search(r": its memory is full for \d s \(of 0\.7\)$", caplog.messages[0])
