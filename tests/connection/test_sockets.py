"""Chunks on the wire: no copy, exact reads, and nothing half-read left behind wherever the connection is cut."""

from __future__ import annotations

import gc
import socket
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
from helpers.certificates import tls_server
from helpers.harness import aggregating
from helpers.servers import free_port, private_directory, running_server
from helpers.waiting import eventually
from kvps_cli import app
from typer.testing import CliRunner

import kvps
from kvps.arrays.digest import view
from kvps.connection.client import Client
from kvps.connection.resp import Replies
from kvps.connection.sockets import ChunkGone, connection_settings
from kvps.connection.urls import redacted
from kvps.errors import ServerError
from kvps.store import Store


class Cutter(socketserver.ThreadingUnixStreamServer):
    """A relay in front of a Unix socket that cuts the connection after so many bytes of the server's answers."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, target: str, path: str) -> None:
        self.cut_after: int | None = None
        self.passed = 0
        self.cuts = 0
        self._target = target
        super().__init__(path, socketserver.BaseRequestHandler)

    def finish_request(self, request: Any, client_address: Any) -> None:
        with socket.socket(socket.AF_UNIX) as far:
            far.connect(self._target)
            asking = threading.Thread(target=self._pump, args=(request, far, False))
            asking.start()
            self._pump(far, request, True)
            asking.join()

    def _pump(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if answers and self.cut_after is not None and self.passed + len(data) > self.cut_after:
                    sink.sendall(data[: self.cut_after - self.passed])
                    self.cut_after, self.cuts = None, self.cuts + 1
                    break
                self.passed += len(data) if answers else 0
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@contextmanager
def cutter(url: str, tmp: Path) -> Iterator[tuple[Cutter, str]]:
    path = str(tmp / "cut")
    with Cutter(url.removeprefix("unix://"), path) as relay:
        serving = threading.Thread(target=relay.serve_forever, args=(0.01,))
        serving.start()
        try:
            yield relay, f"unix://{path}"
        finally:
            relay.shutdown()
            serving.join()


@pytest.fixture
def client(server_url: str) -> Iterator[Client]:
    with Client(server_url) as found:
        yield found


def _items(arrays: list[np.ndarray]) -> list[tuple[str, memoryview]]:
    return [(f"chunk:{i}", view(array)) for i, array in enumerate(arrays)]


def _arrays(sizes: list[int]) -> list[np.ndarray]:
    return [np.random.default_rng(i).normal(size=n).astype(np.float32) for i, n in enumerate(sizes)]


@pytest.mark.parametrize("sizes", [[1], [10, 1, 7], [262_144] * 9 + [5], [3] * 300, [4096, 1, 4097, 9000]])
def test_what_is_put_is_got(client: Client, sizes: list[int]) -> None:
    """Also values made of several pieces, small ones joined and large ones sent from where they lie."""
    arrays = _arrays(sizes)
    halves = [(key, [value[: len(value) // 8 * 4], value[len(value) // 8 * 4 :]]) for key, value in _items(arrays)]
    client.put(halves)
    got = [np.empty_like(array) for array in arrays]
    client.get(_items(got))
    for array, copy in zip(arrays, got, strict=True):
        assert array.tobytes() == copy.tobytes()


def test_a_chunk_that_is_gone_or_has_another_length(client: Client, store: Store) -> None:
    arrays = _arrays([100, 100, 100])
    client.put([(key, [value]) for key, value in _items(arrays)])
    store.client.call("DEL", "chunk:1")
    with pytest.raises(ChunkGone, match="gone"):
        client.get(_items(arrays))
    store.client.call("SET", "chunk:1", "short")
    with pytest.raises(ChunkGone, match="5 bytes, not 400"):
        client.get(_items(arrays))
    store.client.call("DEL", "chunk:1")
    store.client.call("HSET", "chunk:1", "a", "b")
    with pytest.raises(ServerError, match="WRONGTYPE"):
        client.get(_items(arrays))
    client.put([(key, [value]) for key, value in _items(arrays)])
    client.get(_items(arrays))


@pytest.mark.parametrize("size", [1, 24, 25, 250, 262_144])
def test_a_lone_chunk_that_is_gone_is_noticed_at_once(client: Client, store: Store, size: int) -> None:
    """Whatever its length: no more is waited for than the server says."""
    with pytest.raises(ChunkGone, match="gone"):
        client.get(_items(_arrays([size])))


def test_refused_sets_are_all_read_and_said() -> None:
    """The first refusal is raised, and the connection still answers the right question afterwards."""
    with running_server("--maxmemory", "6mb") as url:
        arrays = _arrays([262_144] * 12)
        with Client(url) as client:
            with pytest.raises(kvps.ServerFull):
                client.put([(key, [value]) for key, value in _items(arrays)], wait_for_room=False)
            got = [np.empty_like(arrays[0])]
            client.get(_items(got))
            assert got[0].tobytes() == arrays[0].tobytes()
        with kvps.connect(url) as store, pytest.raises(ServerError, match="of its maxmemory"):
            store.create_job("big", {"x": np.zeros(4 << 20, np.float32)})


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 5], ids=["a read", "a wait"])
def test_an_answer_that_is_cut_is_asked_for_again(server_url: str, store: Store, step: int) -> None:
    """The answers to a pull are cut after each of their bytes in turn, and that with which a blocked worker wakes up
    (bell, state and weights) after every fifth. What comes is whole all the same."""
    job = store.create_job("cut", {"a": np.arange(5, dtype=np.float32)}, shards=2, optimizer=kvps.SGD(lr=1.0))
    with aggregating(job), job.join("w0") as session:
        turns = []
        for _ in range(2):
            session.pull()
            session.push({"a": np.ones(5, np.float32)})
            assert eventually(lambda: job.state().version == session.sequence)
            turns.append(job.access.reader.round_state())
    with private_directory() as tmp, cutter(server_url, tmp) as (relay, url), kvps.connect(url) as through:
        reader, flat = through.job("cut").access.reader, np.empty(5, np.float32)

        def answered() -> None:
            flat.fill(0)
            if step > 1:
                round_state, came = reader.next_round_state("w0", turns[0], flat)
                assert (round_state.names, came) == (turns[1].names, True)
            else:  # a snapshot would wait for the next version
                assert reader.fetch(reader.round_state(), flat).version == 2
            assert flat.tolist() == [-2, -1, 0, 1, 2]

        answered()
        relay.passed = 0
        answered()
        length = relay.passed
        assert length > 300
        for at in range(0, length, step):
            relay.passed, relay.cut_after = 0, at
            answered()
        assert relay.cuts == len(range(0, length, step))


@pytest.mark.parametrize("whole", [True, False])
def test_a_push_cut_at_every_byte_counts_once(
    server_url: str, store: Store, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    """The answers to a push are cut after each of their bytes: acknowledged exactly once, in order. Also of a push
    that is stored first and then accepted, as a large one is."""
    monkeypatch.setattr(Client, "small_bytes", Client.small_bytes if whole else 0)
    job = store.create_job("cut", {"a": np.zeros(5, np.float32)}, shards=2, staleness=999)
    with (
        private_directory() as tmp,
        cutter(server_url, tmp) as (relay, url),
        kvps.connect(url) as through,
        through.job("cut").join("w0") as session,
    ):
        for number in (1, 2):
            session.pull()
            relay.passed = 0
            assert session.push({"a": np.ones(5, np.float32)}) == number
        length = relay.passed
        for number, at in enumerate(range(length), start=3):
            session.pull()
            relay.passed, relay.cut_after = 0, at
            assert session.push({"a": np.ones(5, np.float32)}) == number
        assert relay.cuts == length
    assert [c.seq for c in job.access.reader.inbox()] == list(range(1, length + 3))


def test_urls_are_shown_without_their_password() -> None:
    assert redacted("redis://me:hush@host:1/0") == "redis://me:***@host:1/0"
    assert redacted("rediss://:hush@host:1") == "rediss://:***@host:1"
    assert redacted("unix:///s?password=hush&db=1") == "unix:///s?password=***&db=1"
    assert "hush" not in repr(kvps.connection.client.Client("redis://:hush@host:1"))
    assert redacted("redis://me:hu@sh@host:1/0") == "redis://me:***@host:1/0"
    assert redacted("redis://m@e:hu:/?#sh@host:1") == "redis://m@e:***@host:1"


@pytest.mark.parametrize(
    "url",
    [
        *("redis://:hush/x@host", "redis://:hush", "redis://host:hush", "http://:hush@host"),
        # With a password of digits first, urllib sees a port of this machine, and then a path, options or a fragment.
        *("redis://:57#hush@/x@127.0.0.1:17381", "redis://:57/hush@h:1"),
        *("redis://:57?hush@h:1", "redis://:57?hush=1@h"),
        *("rediss://u:57#hush@h", "redis+sentinel://:57#hush@h/m", "redis+sentinel://:57/hush@h/m"),
        *("unix://:hush/x@/s", "unix:///s#hush", "redis://:57\thush@h", "redis://h/hush"),
    ],
)
def test_a_url_that_is_none_is_not_quoted(url: str) -> None:
    """Where its password ends nobody knows, and urllib's errors quote it as a port."""
    with pytest.raises(kvps.InvalidSetting, match=r"redis://HOST:PORT.* percent-encode") as caught:
        kvps.connect(url)
    assert "hush" not in str(caught.value)
    assert "57" not in str(caught.value)


def test_urls_of_many_forms() -> None:
    for url, host, password in [
        ("redis://me:hu@sh@host:1/3?socket_timeout=1", "host", "hu@sh"),
        ("rediss://:a%2Fb%23c@[::1]:1/", "::1", "a/b#c"),
        ("redis://", "localhost", None),
        ("unix://:hush@/run/my dir/user@1/s?db=2", None, "hush"),
    ]:
        settings = connection_settings(url)
        assert settings.get("host", None if "path" in settings else "localhost") == host
        assert settings.get("password") == password


def test_a_first_connection_that_is_cut_is_tried_again(server_url: str, tmp_path: Path) -> None:
    """As every later one is: a server that is up answers."""
    with private_directory() as folder, cutter(server_url, folder) as (relay, url):
        for at in (0, 3, 40):
            relay.passed, relay.cut_after = 0, at
            with kvps.connect(url) as store:
                assert store.client.call("PING")
        assert relay.cuts == 3


def test_a_port_for_tls_is_said(tmp_path: Path) -> None:
    with tls_server(tmp_path) as url:
        for scheme, secure in (("redis", "rediss"), ("redis+sentinel", r"rediss\+sentinel")):
            plain = url.replace("rediss", scheme) + ("/name" if "sentinel" in scheme else "")
            with pytest.raises(kvps.NoServer, match=f"speaks TLS: write {secure}://"):
                kvps.connect(plain)


def test_a_port_without_tls_is_said() -> None:
    says = pytest.raises(kvps.NoServer, match="does not speak TLS: write redis://")
    with running_server("--port", str(port := free_port())), says:
        kvps.connect(f"rediss://127.0.0.1:{port}?socket_timeout=0.2")


def test_a_limit_that_cuts_replies_is_named() -> None:
    """The server closes the connection when it has so much to send."""
    with running_server() as url, kvps.connect(url) as store:
        store.client.call("CONFIG", "SET", "client-output-buffer-limit", "normal 1mb 0 0")
        store.client.call("RPUSH", "long", *["x" * (1 << 19)] * 6)
        says = r"cuts off clients with more than 1\.0 MB still to read.*client-output-buffer-limit 'normal 0 0 0'"
        with pytest.raises(kvps.ServerUnfit, match=says):
            store.client.call("LRANGE", "long", 0, -1)
        looked = CliRunner().invoke(app, ["doctor", "--redis", url])
        assert (looked.exit_code, "client-output-buffer-limit" in looked.stdout) == (1, True)


def test_a_limit_for_all_clients_is_named() -> None:
    """The server closes the connections of those with the most to read, or that write the most."""
    with running_server() as url, kvps.connect(url) as store:
        store.client.call("RPUSH", "long", *["x" * (1 << 19)] * 6)
        if not store.client.call("CONFIG", "GET", "maxmemory-clients"):
            pytest.skip("this server is older than that limit")
        store.client.call("CONFIG", "SET", "maxmemory-clients", "1mb")
        says = pytest.raises(kvps.ServerUnfit, match=r"has cut off \d+ clients?, .*: CONFIG SET maxmemory-clients 0$")
        with says:
            store.client.call("LRANGE", "long", 0, -1)
        with says:
            store.create_job("j", {"a": np.zeros(1_000_000, np.float32)}, transport="redis")


@pytest.mark.contract
def test_a_client_that_was_closed_connects_no_more(server_url: str) -> None:
    """A heartbeat's thread would otherwise keep a worker alive whose process has closed its store."""
    with kvps.connect(server_url) as store, kvps.connect(server_url) as watching:

        def connections() -> int:
            return sum(watching.client.on_masters(lambda node: len(node.call("CLIENT LIST"))))

        store.client.call("SET", "x", "y")
        before = connections()
        store.close()
        for _ in range(2):
            with pytest.raises(kvps.ServerLost, match="was closed here"):
                store.client.call("GET", "x")
        assert eventually(lambda: connections() < before)


def test_what_nobody_has_any_more_is_closed_though_no_garbage_is_collected(store: Store) -> None:
    def connections() -> int:
        return len(store.client.call("CLIENT LIST"))

    gc.disable()
    try:
        before, client = connections(), Client(store.url)
        assert client.call("PING")
        assert connections() == before + 1
        del client
        assert eventually(lambda: connections() == before)
    finally:
        gc.enable()


def test_a_wait_ends_before_its_connection_gives_up(server_url: str) -> None:
    with Client(f"{server_url}?socket_timeout=1", patience_s=0.1) as client:
        assert client.wait({"no-such-stream": "0"}, 5000) == {}


REPLIES = (
    b"+OK\r\n:-7\r\n$-1\r\n*-1\r\n$4\r\na\r\nb\r\n*2\r\n$0\r\n\r\n*1\r\n:5\r\n-ERR no\r\n$3\r\nxyz\r\n$2\r\nxy\r\n"
)


@pytest.mark.parametrize("piece", [1, 2, 3, 7, 1000])
def test_replies_are_read_however_they_come(piece: int) -> None:
    coming = [REPLIES[i : i + piece] for i in range(0, len(REPLIES), piece)]

    def receive(target: bytearray) -> int:
        now = coming.pop(0)
        if rest := now[len(target) :]:
            coming.insert(0, rest)
        target[: min(len(now), len(target))] = now[: len(target)]
        return min(len(now), len(target))

    replies, target = Replies(receive, redis.exceptions.ResponseError), bytearray(3)
    assert [replies.next() for _ in range(6)] == ["OK", -7, None, None, "a\r\nb", ["", [5]]]
    assert str(replies.next()) == "ERR no"
    assert replies.fill(memoryview(target)) is True
    assert target == b"xyz"
    assert replies.fill(memoryview(target)) == b"xy", "of another length: it is not what was asked for"
    replies.end()


INTERRUPTED = """
import signal
from kvps.connection.resp import packed
from kvps.connection.sockets import connection_settings

def handler(*_):
    raise InterruptedError

pack, interrupts = connection_settings("redis://localhost")["command_packer"].pack, 0
signal.signal(signal.SIGALRM, handler)
while interrupts < 300:
    try:
        signal.setitimer(signal.ITIMER_REAL, 1e-4)
        while True:
            packed(("SET", *range(100), 0.5))
            pack("SELECT", *range(100), 0.5)
    except InterruptedError:
        interrupts += 1
"""


def test_a_handler_that_raises_while_a_number_is_packed_does_not_crash() -> None:
    """hiredis has Python write a number, which answers NULL then, and hiredis reads from there."""
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("garbage", [b"?\r\n", b"\r\n", b"$x\r\n", b"*1\r\n$1\r\n", b":1\r\n:2\r\n", b"*1\r\n" * 5000])
def test_what_is_no_reply_is_said(garbage: bytes) -> None:
    def receive(target: bytearray) -> int:
        if len(coming) == 0:
            raise redis.exceptions.ConnectionError("closed")
        target[: len(garbage)] = coming.pop()
        return len(garbage)

    def read() -> None:
        replies = Replies(receive, redis.exceptions.ResponseError)
        replies.next()
        replies.end()

    coming = [garbage]
    with pytest.raises((redis.exceptions.InvalidResponse, redis.exceptions.ConnectionError)):
        read()


def test_a_refused_set_refuses_the_command_behind_it(store: Store) -> None:
    """Or a push would be acknowledged without its bytes."""
    value = [memoryview(b"x" * 100)]
    assert store.client.put_and_call([("a", value)], "INCR", "n") == 1
    patience, store.client._patience_s = store.client._patience_s, 0.1
    store.client.call("CONFIG", "SET", "maxmemory", 1)
    try:
        with pytest.raises(kvps.ServerFull):
            store.client.put_and_call([("b", value)], "DEL", "a")
    finally:
        store.client.call("CONFIG", "SET", "maxmemory", 0)
        store.client._patience_s = patience
    assert store.client.call("EXISTS", "a", "b") == 1
    with pytest.raises(ServerError, match="not an integer"):
        store.client.put_and_call([("b", value)], "INCR", "a")


def test_connections_that_died_while_nobody_used_them_are_not_noticed(server_url: str, store: Store) -> None:
    with Client(server_url) as client:
        threads = [threading.Thread(target=client.wait, args=({"no-such-stream": "0"}, 200)) for _ in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        store.client.call("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        assert client.call("PING")
        client.put_once([("a", [memoryview(b"x")])])
        assert client.call("GET", "a") == "x"


def test_a_refused_login_is_known_at_once(store: Store) -> None:
    """The connection waited for more words of the server, which had said all and stayed; here that takes an hour."""
    url = store.url.replace("unix://", "unix://nobody:wrong@") + "?socket_timeout=3600"
    with ThreadPoolExecutor(1) as thread:
        refused = thread.submit(kvps.connect, url)
        try:
            assert "refuses the login" in str(refused.exception(timeout=60))
        finally:
            store.client.call("CLIENT KILL", "TYPE", "normal")
