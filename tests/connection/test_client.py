"""How many connections a process may have, and a server that takes no more, or refuses for a while."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import redis
from helpers.commands import kvps_run
from helpers.harness import Params, aggregating, work
from helpers.servers import free_port, running_server
from helpers.waiting import eventually
from kvps_aggregator import Aggregator
from kvps_aggregator.job_watcher import JobWatcher
from kvps_workers.queue.queue import CPU, TaskQueue

import kvps
from kvps.connection import sockets
from kvps.connection.client import Client
from kvps.connection.sockets import client_name
from kvps.session.session import Session
from kvps.store import Store

TINY = {"x": np.zeros(2, np.float32)}
ONES = {"x": np.ones(2, np.float32)}


def _one(session: Session, params: Params, round_: int) -> Params:
    return ONES


# -- this process's own limit -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_150_sessions_of_one_process_train(store: Store) -> None:
    """In BSP each that waits holds a connection, and its heartbeat needs another."""
    job = store.create_job("job", TINY, workers=150, worker_timeout_ms=60_000, optimizer=kvps.SGD(lr=1.0))
    with aggregating(job):
        work(job, 2, _one, workers=150)
        assert job.await_finished()
    assert [member.process["incarnations"] for member in job.state().members.values()] == [1] * 150, (
        "nobody was evicted"
    )
    np.testing.assert_array_equal(job.snapshot()[1]["x"], np.float32([-2, -2]))


@pytest.mark.parametrize("limit", ["0", "-1"])
def test_a_limit_in_the_url_is_1_or_more(store: Store, limit: str) -> None:
    with pytest.raises(kvps.InvalidSetting, match="max_connections must be 1 or more"):
        kvps.connect(f"{store.url}?max_connections={limit}")


def test_a_limit_in_the_url_is_kept_and_said(store: Store) -> None:
    with kvps.connect(f"{store.url}?max_connections=2") as limited:
        limited.client._patience_s = 0.3
        using = [limited.client._arrays.using() for _ in range(2)]
        for connection in using:
            connection.__enter__()
        with pytest.raises(
            kvps.ServerLost, match=r"that max_connections=2 in its URL allows were in use for 0\.3 s: raise that"
        ):
            limited.client.call("GET", "none")
        for connection in using:
            connection.__exit__(None, None, None)
        assert limited.client.call("GET", "none") is None


def test_connections_that_a_crowd_has_left_are_closed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with kvps.connect(store.url) as crowded:

        def connections() -> int:
            return sum(c["name"] == client_name() for c in store.client.call("CLIENT LIST"))

        others = connections() - 1
        with ExitStack() as crowd:
            for _ in range(20):
                crowd.enter_context(crowded.client._arrays.using())
        assert connections() - others == 20
        monkeypatch.setattr(sockets, "_UNUSED_S", 0.0)
        for _ in range(30):
            crowded.client.call("GET", "none")
        assert eventually(lambda: connections() - others == 1)


# -- the server's limit -------------------------------------------------------------------------------------------

ALLOWED = 30
REFUSED = f"refused one more connection: it has as many clients as its maxclients, {ALLOWED}; raise that"


class SmallServer:
    """A server that takes few clients, of whom this is one; on a socket and on a port."""

    def __init__(self, url: str, port: int) -> None:
        self.urls = {"unix": url, "tcp": f"redis://127.0.0.1:{port}"}
        self._admin: Any = redis.Redis.from_url(url, single_connection_client=True, protocol=2)
        self._others = ExitStack()

    def fill(self) -> None:
        """Have it take no more."""
        while self._admin.info("clients")["connected_clients"] < ALLOWED:
            client = self._others.enter_context(socket.socket(socket.AF_UNIX))
            client.connect(self.urls["unix"].removeprefix("unix://"))
            client.sendall(b"PING\r\n")
            assert client.recv(7) == b"+PONG\r\n"

    def cut(self) -> None:
        """Cut all clients but this one, and let none come back."""
        self._admin.config_set("maxclients", 1)
        self._admin.client_kill_filter(_type="normal", skipme=True)

    def close(self) -> None:
        self._admin.close()
        self._others.close()


@pytest.fixture
def small() -> Iterator[SmallServer]:
    port = free_port()
    with running_server("--maxclients", str(ALLOWED), "--port", str(port)) as url:
        server = SmallServer(url, port)
        yield server
        server.close()


@pytest.mark.slow
@pytest.mark.parametrize("over", ["unix", "tcp"])
def test_a_client_too_many_is_told_so(small: SmallServer, over: str) -> None:
    small.fill()
    with pytest.raises(kvps.TooManyClients, match="refused one more connection: it has as many clients as its maxcl"):
        kvps.connect(small.urls[over])
    with pytest.raises(kvps.TooManyClients, match="raise that"):
        TaskQueue(small.urls[over], CPU)
    if over == "unix":
        done = kvps_run("aggregator", "start", "--redis", small.urls[over])
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1), done.stderr
        assert "refused one more connection" in done.stderr


@pytest.mark.parametrize("over", ["unix", "tcp"])
def test_a_session_that_is_not_let_in_again_says_so(
    small: SmallServer, over: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Store(Client(small.urls[over], patience_s=0.3)) as store:
        store.client.preflight()
        job = store.create_job("job", TINY, worker_timeout_ms=300)
        session = job.join("w0")
        small.cut()
        with pytest.raises(kvps.TooManyClients, match=REFUSED):
            session.pull()
        assert eventually(lambda: "worker w0 cannot say that it lives" in caplog.text), "its heartbeat says it too"
        with pytest.raises(kvps.TooManyClients, match=REFUSED):
            session.leave()


def test_an_aggregator_that_is_not_let_in_again_ends_with_the_reason(small: SmallServer) -> None:
    with Store(Client(small.urls["unix"], patience_s=0.3)) as store:
        store.client.preflight()
        raised: list[BaseException] = []

        def run() -> None:
            try:
                JobWatcher(store, raised.append, lambda job: None).run()  # type: ignore[arg-type]
            except BaseException as error:
                raised.append(error)

        idle, busy = (store.create_job(name, TINY, lease_ms=300) for name in ("idle", "busy"))
        busy.join("w0")
        thread = threading.Thread(target=run)
        thread.start()
        assert eventually(lambda: all(busy.access.reader.holders()))
        assert idle.access.reader.holders() == [""]
        small.cut()
        thread.join(120)
    assert [type(error) for error in raised] == [kvps.TooManyClients]
    assert REFUSED in str(raised[0])


def test_leases_that_cannot_be_renewed_are_said(small: SmallServer, caplog: pytest.LogCaptureFixture) -> None:
    """The loop of the job has its connection, and meets no error."""
    with Store(Client(small.urls["unix"], patience_s=0.3)) as store:
        store.client.preflight()
        job = store.create_job("job", TINY, lease_ms=300)
        aggregator = Aggregator(job, threading.Event())
        aggregator.hold()
        small.cut()
        assert eventually(lambda: f"leases cannot be renewed: {small.urls['unix']} refused" in caplog.text)
        with pytest.raises(kvps.TooManyClients):
            aggregator.release()


# -- a server that refuses for a while ----------------------------------------------------------------------------

ITEMS = [("x", [memoryview(b"x")])]


def test_a_server_that_is_busy_with_a_script_is_waited_for() -> None:
    now = "local function now() local t = redis.call('TIME') return t[1] * 1000 + t[2] / 1000 end "
    busy = now + "local begun = now() repeat until now() > begun + 400"
    refused = threading.Event()
    with running_server() as url, Client(url) as client, Client(url) as other:
        client.call("CONFIG", "SET", "lua-time-limit", 20)

        def keep_busy() -> None:
            while not refused.is_set():  # this process may sleep through a script
                other.call("EVAL", busy, 0)

        thread = threading.Thread(target=keep_busy)
        thread.start()
        seen = eventually(lambda: _refuses_busy(url))
        refused.set()
        client.put(ITEMS)
        assert seen
        assert client.call("GET", "x") == "x"
        thread.join()


def _refuses_busy(url: str) -> bool:
    with redis.Redis.from_url(url) as client:
        try:
            client.get("x")
        except redis.exceptions.ResponseError as error:
            return str(error).startswith("BUSY ")
    return False


def test_a_replica_that_is_promoted_in_time_is_waited_for() -> None:
    with running_server() as url, Client(url) as client, Client(url, patience_s=0.1) as impatient:
        for write in (lambda: client.put(ITEMS), lambda: client.call("SET", "x", "y")):
            client.call("REPLICAOF", "127.0.0.1", "1")
            with pytest.raises(kvps.ServerError, match="replica"):
                impatient.call("SET", "x", "y")
            promoted = threading.Timer(0.3, client.call, ("REPLICAOF", "NO", "ONE"))
            promoted.start()
            write()
            promoted.join()
