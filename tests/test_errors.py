"""Wrong input gets one clear line that says what and what to do, and changes nothing."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import kvps_aggregator
import numpy as np
import pytest
import redis
from helpers.harness import aggregating
from helpers.servers import running_server

import kvps
from kvps import optim
from kvps.connection.server_info import check_fit, server_name, version_of
from kvps.store import Store

PARAMS = {"W": np.ones((2, 3), np.float32), "b": np.ones(3, np.float32)}


def _refuses(store: Store, error: type[kvps.KvpsError], call: Callable[[], object], *words: str) -> None:
    before = _everything(store)
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message
    assert _everything(store) == before


def _everything(store: Store) -> dict[bytes, Any]:
    """All that is stored, but for who is alive."""
    with redis.Redis.from_url(store.url) as client:
        keys = sorted(k for k in client.scan_iter() if b"heartbeat" not in k and k != b"kvps:preflight")
        # A hash that Redis is still spreading over a larger table is dumped in another order each time.
        return {key: client.hgetall(key) if client.type(key) == b"hash" else client.dump(key) for key in keys}


def test_jobs(store: Store) -> None:
    store.create_job("there", PARAMS)
    _refuses(store, kvps.JobNotFound, lambda: store.job("missing"), "missing", "kvps jobs")
    _refuses(store, kvps.JobNotFound, lambda: store.remove_job("missing"), "missing")
    _refuses(store, kvps.JobExists, lambda: store.create_job("there", PARAMS), "there", "kvps rm there")


def test_names(store: Store) -> None:
    job = store.create_job("job", PARAMS)
    for name in ("", "a b", "a/b", "{x}", "a*", "ä", "x" * 65, "a\n", "a:b", "\0", ".a", "..", "=a"):
        _refuses(store, kvps.InvalidName, lambda name=name: store.create_job(name, PARAMS), "1 to 64")
        _refuses(store, kvps.InvalidName, lambda name=name: store.job(name), "1 to 64")
        _refuses(store, kvps.InvalidName, lambda name=name: job.join(name), "1 to 64")


@pytest.mark.parametrize("setting", [{"staleness": -2}, {"shards": 10}, {"no_such_setting": 1}], ids=str)
def test_settings(store: Store, setting: dict[str, Any]) -> None:
    """A value out of its range, one that does not fit the model, an unknown name; tests/test_config.py has the rest."""
    _refuses(store, kvps.InvalidSetting, lambda: store.create_job("job", PARAMS, **setting), next(iter(setting)))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "optimizer '' is unknown"),
        ("sgd:", "name=number"),
        ("sgd:=1", "name=number"),
        ("sgd:lr=1,", "name=number"),
        ("sgd:kind=adam", "name=number"),
        ('sgd:lr={"kind":"step"}', "name=number"),
        ("sgd:kind=1", "no setting 'kind'"),
        ("sgd:lr=NaN", "finite"),
        ("sgd:lr=1e999", "finite"),
        ("sgd:lr=true", "finite number"),
        ("sgd:lr=1,lr=2", "lr is given twice"),
        ("sgd:momentum=0.9,nesterov=1", "true or false"),
    ],
)
def test_the_optimizer_option(text: str, words: str) -> None:
    with pytest.raises(kvps.InvalidSetting, match=re.escape(words)) as caught:
        optim.parse(text)
    assert "\n" not in str(caught.value)


def test_a_learning_rate_is_given_once() -> None:
    with pytest.raises(kvps.InvalidSetting, match="lr is given twice"):
        optim.parse("sgd:lr=0.1", 0.2)
    assert optim.parse("sgd:momentum=0.9,nesterov=true", 0.2) == kvps.SGD(0.2, 0.9, True)


def test_stored_optimizers_that_this_kvps_cannot_read() -> None:
    for stored, words in [
        ({"kind": "rprop", "lr": 0.1}, "'rprop' is unknown"),
        ({"kind": ["sgd"]}, "unknown"),
        ({"lr": 0.1}, "None is unknown"),
        ({"kind": "sgd", "lr": {"kind": "weekly"}}, "schedule 'weekly' is unknown"),
        ({"kind": "sgd", "lr": {"kind": "step", "initial": 1}}, "step needs every"),
    ]:
        with pytest.raises(kvps.InvalidSetting, match=words):
            optim.from_json(stored)


@pytest.mark.parametrize(
    ("params", "error", "words"),
    [
        ({}, kvps.LayoutMismatch, "at least one"),
        ({"W": np.ones((0, 3), np.float32)}, kvps.LayoutMismatch, "one parameter that has items"),
        ({"": np.ones(3, np.float32)}, kvps.LayoutMismatch, "of 1 to 1024 characters"),
        ({"W": np.array([1, np.nan], np.float32)}, kvps.NotFinite, "'W'"),
    ],
)
def test_parameters(store: Store, params: dict[str, Any], error: type[kvps.KvpsError], words: str) -> None:
    _refuses(store, error, lambda: store.create_job("job", params), words)


@pytest.mark.parametrize(
    ("grads", "error", "words"),
    [
        ({"W": PARAMS["W"]}, kvps.LayoutMismatch, "missing b"),
        (PARAMS | {"c": PARAMS["b"]}, kvps.LayoutMismatch, "unknown c"),
        (PARAMS | {"b": np.ones(4, np.float32)}, kvps.LayoutMismatch, "shape (4,)"),
        (PARAMS | {"b": np.array([1, np.nan, 1], np.float32)}, kvps.NotFinite, "'b'"),
        (PARAMS | {"b": np.array([1, -np.inf, 1], np.float32)}, kvps.NotFinite, "nonfinite='skip'"),
    ],
)
def test_gradients(store: Store, grads: dict[str, Any], error: type[kvps.KvpsError], words: str) -> None:
    job = store.create_job("job", PARAMS)
    with job.join("w0") as session:
        session.pull()
        _refuses(store, error, lambda: session.push(grads), words)
        assert session.push(PARAMS) == 1, "the push may be made again"


def test_the_order_of_calls(store: Store) -> None:
    job = store.create_job("job", PARAMS, workers=2)
    with job.join("w0") as session, ThreadPoolExecutor(1) as another_thread:
        _refuses(store, kvps.WrongOrder, lambda: session.push(PARAMS), "pull()")
        session.pull()
        assert "thread" in str(another_thread.submit(session.push, PARAMS).exception())
        session.push(PARAMS)
        _refuses(store, kvps.WrongOrder, lambda: session.push(PARAMS), "pull()")
    _refuses(store, kvps.WrongOrder, session.pull, "closed")


def test_the_id_of_a_living_worker(store: Store) -> None:
    job = store.create_job("job", PARAMS)
    with job.join("w0") as first:
        _refuses(store, kvps.WorkerAlive, lambda: job.join("w0"), "w0", "in this very process", "close its session")
        first.pull()
        with job.join("w0", takeover=True) as second:
            assert second.rank == first.rank
            assert second.incarnation != first.incarnation
            with pytest.raises(kvps.WorkerEvicted, match="join again"):
                first.push(PARAMS)
            second.pull()
            assert second.push(PARAMS) == 1


def test_a_round_whose_only_contribution_is_rejected_still_ends(store: Store) -> None:
    job = store.create_job("job", PARAMS, optimizer=kvps.SGD(lr=1.0))
    with job.join("w0") as session:
        session.pull()
        session.push(PARAMS)
        store.client.call("DEL", job.access.keys.gradient(0, "w0", session.incarnation, 1, 0))
        with aggregating(job):
            np.testing.assert_array_equal(session.pull()["b"], PARAMS["b"])
            assert session.version == 1
            session.push(PARAMS)
            np.testing.assert_array_equal(session.pull()["b"], PARAMS["b"] - 1)
            session.push(PARAMS)
    assert [(len(c.plan.contributions), len(c.plan.rejected)) for c in job.log()][:2] == [(0, 1), (1, 0)]


def test_weights_changed_by_another_program_are_noticed(store: Store) -> None:
    job = store.create_job("job", PARAMS)
    with aggregating(job), job.join("w0") as session:
        session.pull()
        session.push(PARAMS)
        session.pull()
    name = job.state().names[0]
    store.client.call("SETRANGE", job.access.keys.weights(0, name, 0), 0, "damage")
    with pytest.raises(kvps.CorruptData, match="differ"):
        kvps_aggregator.serve(job)
    store.client.call("DEL", job.access.keys.weights(0, name, 0))
    with pytest.raises(kvps.CorruptData, match="gone"):
        job.snapshot()


def test_no_server() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        with pytest.raises(kvps.NoServer, match=f"127.0.0.1:{port}"):
            kvps.connect(f"redis://:secret@127.0.0.1:{port}")
    with pytest.raises(kvps.NoServer) as caught:
        kvps.connect("unix:///nowhere/redis.sock?password=secret")
    assert "secret" not in str(caught.value)
    with pytest.raises(kvps.InvalidSetting, match="redis://"):
        kvps.connect("http://localhost")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--maxmemory 64mb --maxmemory-policy allkeys-lru", "noeviction"),
        ("--replicaof 127.0.0.1 1", "cannot be written"),
    ],
)
def test_a_server_that_is_unfit(options: str, words: str) -> None:
    with running_server(*options.split()) as url, pytest.raises(kvps.ServerUnfit, match=words):
        kvps.connect(url)


def test_an_old_server(old_server: str) -> None:
    with pytest.raises(kvps.ServerUnfit, match=r"Redis 5\.0\.\d+.*Redis 6\.2 or newer, or Valkey"):
        kvps.connect(old_server)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("redis://h/?foo=1", "'foo'"),
        ("redis://h/?socket_timeout=soon", "'socket_timeout'"),
        ("redis://h/?socket_timeout=-1", "socket_timeout"),
        ("rediss://h/?ssl_cert_reqs=maybe", "ssl_cert_reqs=maybe"),
    ],
)
def test_options_of_a_url(url: str, words: str) -> None:
    with pytest.raises(kvps.InvalidSetting, match=words):
        kvps.connect(url)


def test_a_port_of_the_private_server_is_not_for_another(server_url: str) -> None:
    with pytest.raises(kvps.InvalidSetting, match="listen"):
        kvps.connect(server_url, listen="127.0.0.1:6400")


@pytest.mark.parametrize("greeting", [b"220 mail\r\n", b"HTTP/1.1 400 Bad Request\r\n\r\n", b":x\r\n", b"+\xff\r\n"])
def test_what_answers_is_no_redis_server(greeting: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPS_PATIENCE", "0.3")
    with socket.create_server(("127.0.0.1", 0)) as server:

        def greet() -> None:
            with server.accept()[0] as connection:
                connection.sendall(greeting)
                connection.recv(1 << 16)

        thread = threading.Thread(target=greet)
        thread.start()
        with pytest.raises(kvps.NoServer, match="check the URL") as caught:
            kvps.connect(f"redis://127.0.0.1:{server.getsockname()[1]}")
        thread.join()
    assert "\n" not in str(caught.value)


def test_a_server_that_stops_answering_in_the_middle(server_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPS_PATIENCE", "0.3")
    with kvps.connect(server_url) as store:
        store.client.call("CLIENT", "PAUSE", 60_000, "WRITE")
        try:
            with pytest.raises(kvps.NoServer, match="no Redis server answers"):
                kvps.connect(f"{server_url}?socket_timeout=0.2")
        finally:
            store.client.call("CLIENT", "UNPAUSE")


def test_valkey_is_not_taken_for_the_redis_whose_commands_it_has() -> None:
    info = {"redis_version": "7.2.4", "server_name": "valkey", "valkey_version": "9.1.2"}
    check_fit("there", info)
    assert server_name(info) == "Valkey 9.1.2"
    assert server_name({"redis_version": "6.2.14"}) == "Redis 6.2.14"
    assert [version_of(text) for text in ("7.4-rc1", "6.2.14", "unstable")] == [(7, 4), (6, 2), (0, 0)]
    with pytest.raises(kvps.ServerUnfit, match="there is Redis unknown"):
        check_fit("there", {})
