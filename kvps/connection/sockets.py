"""Moves arrays over redis-py connections without a copy on the way.

redis-py packs a value into its own buffers and parses replies through them; for a 1 MiB chunk, both cost more than the
kernel's part. Here redis-py still does all connecting (URL, auth, TLS, Unix sockets, errors). Only bulk values take
another way: they are sent as pieces of the arrays' own memory between two short headers, and received by `recv_into`
straight into a given buffer. The layout says all lengths beforehand, so each reply is read exactly and nothing is ever
read ahead.

A connection on which anything went wrong in the middle is closed and never given back to the pool, so that no caller
can read half a reply of another.
"""

from __future__ import annotations

import os
import re
import secrets
import ssl
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, cast
from weakref import WeakMethod

from redis.backoff import NoBackoff
from redis.connection import (
    Connection,
    ConnectionPool,
    SSLConnection,
    UnixDomainSocketConnection,
    parse_url,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import InvalidResponse, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry

from kvps.arrays.digest import Buffers
from kvps.arrays.layout import CHUNKS_AHEAD
from kvps.connection import patience, sentinel
from kvps.connection.credentials import credentials, over_tls
from kvps.connection.replicas import IF_ANY, NONE, Copies
from kvps.connection.resp import Command, Replies, packed
from kvps.connection.urls import check_form, redacted
from kvps.errors import InvalidSetting
from kvps.machine import launcher

SOCKET_TIMEOUT_S = 10.0
CONNECT_TIMEOUT_S = 5.0
_COALESCE_BYTES = 16 << 10  # smaller pieces are joined: a copy of them is cheaper than a system call each
_SET_WINDOW = 64  # replies to SET that may wait to be read; each is 5 bytes
_UNUSED_S = 60.0
_NO_LIMIT = 2**31  # connections: the server has a limit of its own, maxclients
_REFUSAL = "max number of clients reached"
_OURS, _CHILD = "kvps-", "kvps-child-"  # `kvps.server.watchdog` knows these too
_NONCE = secrets.token_hex(4)  # pids of several machines, or of containers, may be the same

try:  # with hiredis redis-py would take arrays through it too: one more copy of each value
    from redis._parsers import _RESP2Parser as _PythonParser
except ImportError:  # pragma: no cover
    from redis.connection import PythonParser as _PythonParser  # type: ignore[attr-defined,no-redef]


_parse_url: Any = parse_url  # untyped in redis-py


def _weak(method: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a function that calls a method of what is alive. A method of its own would keep a connection that nobody
    has any more open until garbage is collected, and so a private server running."""
    known = WeakMethod(method)
    return lambda argument: cast(Any, known())(argument)


class _Packer:
    """Packs what redis-py itself sends, such as SELECT: it would hand hiredis numbers, see `packed`."""

    @staticmethod
    def pack(*command: Any) -> list[bytes]:
        return [packed(command)]


Stored = Callable[[str], None]
"""Called with each key that the server has stored."""
Refused = Callable[[str, ResponseError], bool]
"""Called with each key that the server has refused; returns whether the caller takes care of it."""


@dataclass(frozen=True)
class Put:
    """A function that SETs one (key, value) without waiting for the answer.

    flush  waits until all values have left the memory they are in
    """

    send: Callable[[str, Buffers], None]
    flush: Callable[[], None] = lambda: None

    def __call__(self, key: str, value: Buffers) -> None:
        self.send(key, value)


class ChunkGone(Exception):
    """A chunk does not exist (any more), or has another length than its layout says."""


CONNECTION_CUT = (RedisConnectionError, RedisTimeoutError)
"""The errors of a call whose connection was cut, or fell silent, before its reply came."""


class ClientRefused(RedisConnectionError):
    """The server already has as many clients as it allows."""


class ClosedHere(RedisConnectionError):
    """This process has closed its connections."""


class Untrusted(RedisConnectionError):
    """The certificate of the server at `place` does not prove that it is the one that is meant."""

    def __init__(self, error: Exception, place: tuple[str, int]) -> None:
        super().__init__(str(error))
        self.place = place


class ReplyCut(RedisConnectionError):
    """The server has closed the connection in the middle of a reply."""


class _Bulk:
    """The methods with which a redis-py connection moves arrays; mixed into each kind of connection."""

    _sock: Any
    socket_timeout: Any
    used_at = 0.0
    _greeted = False
    _last_words = b""
    _replies: Replies | None = None  # made once a connection, and with that: half a reply may be left in it

    def connect(self) -> None:
        """Connect and greet the server. Raises ClientRefused, and redis-py's errors as they come."""
        self._greeted, self._last_words = False, b""
        if patience.ending.is_set():
            self.socket_timeout = min(self.socket_timeout, patience.LAST_S)
        try:
            cast(Any, super()).connect()
        except RedisConnectionError as error:
            if _REFUSAL in f"{error} {self._last_words!r}":
                raise ClientRefused(_REFUSAL) from None
            raise
        self._greeted = True

    def disconnect(self, *args: Any, **named: Any) -> None:
        """Close it. If the greeting has failed, first read why: a server that refuses a client says so and closes."""
        if self._sock is not None and not self._greeted:
            with suppress(OSError):
                self._sock.settimeout(0)  # a server that refuses only the login says no more
                self._last_words = self._sock.recv(256)
        self._replies = None
        cast(Any, super()).disconnect(*args, **named)

    def write_set(self, key: str, value: Buffers) -> None:
        """Send ``SET key value``, the value straight from the memory of its pieces."""
        nbytes = sum(piece.nbytes for piece in value)
        name = key.encode()
        head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(name), name, nbytes)
        self._send([head, *value, b"\r\n"])

    def write_get(self, key: str) -> None:
        """Send ``GET key``."""
        name = key.encode()
        self._send([b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(name), name)])

    def read_get(self, target: memoryview) -> None:
        """Read one reply to ``GET`` into `target`. Raises ChunkGone unless it is as long as `target`."""
        expected = b"$%d\r\n" % target.nbytes
        head = bytearray(len(expected))
        # The shortest reply is "$-1\r\n": a first read of more bytes could wait for bytes that never come.
        begun = min(5, len(head))
        self._read_exactly(memoryview(head)[:begun])
        if head[:begun] != expected[:begun]:
            raise self._other_reply(bytes(head[:begun]), target.nbytes)
        self._read_exactly(memoryview(head)[begun:])
        if head != expected:
            raise self._other_reply(bytes(head), target.nbytes)
        self._read_exactly(target)
        end = bytearray(2)
        self._read_exactly(memoryview(end))
        if end != b"\r\n":
            raise InvalidResponse("a chunk did not end where its length says")

    def getting(self, items: Sequence[tuple[str, memoryview]]) -> Generator[None, None, None]:
        """GET each key into its buffer, and yield when each is filled. Raises ChunkGone."""
        asked = 0
        for number, (_, target) in enumerate(items):
            while asked < min(len(items), number + CHUNKS_AHEAD):
                self.write_get(items[asked][0])
                asked += 1
            self.read_get(target)
            yield

    def exchange(
        self, commands: Sequence[Command], gets: Sequence[tuple[str, memoryview]]
    ) -> tuple[list[Any], list[bool]]:
        """Send commands and GETs in one piece. Return the replies to the commands (see `Replies`), and for each GET
        whether it filled its buffer: the value existed and had that length. Raises the error of a GET that was refused.
        """
        asked = [*commands, *(("GET", key) for key, _ in gets)]
        cast(Any, self).send_packed_command([b"".join(map(packed, asked))])
        replies = self._replies = self._replies or Replies(_weak(self._receive), _weak(self._error))
        answers = [replies.next() for _ in commands]
        got = [replies.fill(target) for _, target in gets]
        replies.end()
        for reply in got:
            if isinstance(reply, ResponseError):
                raise reply
        return answers, [reply is True for reply in got]

    def _error(self, line: str) -> RedisError:
        """Return the error of an error reply. Raise it if every command gets it now, as while the server loads."""
        # redis-py's parser knows which class an error code has (LOADING, READONLY, OOM, NOPERM ...)
        error = cast(RedisError, cast(Any, self)._parser.parse_error(line))
        if isinstance(error, RedisConnectionError):
            raise error
        return error

    def _other_reply(self, head: bytes, nbytes: int) -> Exception:
        """Return the error for an unexpected reply; any bytes after that reply are never read (see `using`)."""
        while b"\r\n" not in head:
            byte = bytearray(1)
            self._read_exactly(memoryview(byte))
            head += byte
        line = head.split(b"\r\n", 1)[0].decode(errors="replace")
        if line.startswith("$"):
            return ChunkGone("a chunk is gone" if line == "$-1" else f"a chunk has {line[1:]} bytes, not {nbytes}")
        if line.startswith("-"):
            return self._error(line[1:])
        return InvalidResponse(f"not a reply to GET: {line[:80]!r}")

    def _send(self, pieces: list[bytes | memoryview]) -> None:
        cast(Any, self).send_packed_command(list(_coalesced(pieces)))

    def _read_exactly(self, target: memoryview) -> None:
        got = 0
        while got < target.nbytes:
            got += self._receive(target[got:])

    def _receive(self, target: bytearray | memoryview) -> int:
        try:
            received = int(self._sock.recv_into(target))
        except TimeoutError:
            raise RedisTimeoutError("the server did not answer in time") from None
        except (OSError, AttributeError) as error:  # it has no socket if another thread has closed it
            raise RedisConnectionError(f"the connection broke while reading: {error}") from None
        if not received:
            raise ReplyCut("the server closed the connection in the middle of a reply")
        return received


class BulkTCP(_Bulk, Connection):
    """A bulk connection over TCP."""


class BulkTLS(_Bulk, SSLConnection):
    """A bulk connection over TLS."""

    def connect(self) -> None:
        """Like `_Bulk.connect`. Raises Untrusted too."""
        try:
            super().connect()
        except RedisConnectionError as error:
            if isinstance(error.__context__, ssl.SSLCertVerificationError):
                raise Untrusted(error, (self.host, int(self.port))) from None
            raise


class BulkUnix(_Bulk, UnixDomainSocketConnection):
    """A bulk connection over a Unix socket."""


class MasterTCP(sentinel.ToMaster, BulkTCP):
    """A bulk connection over TCP to the master that Sentinels name."""


class MasterTLS(sentinel.ToMaster, BulkTLS):
    """A bulk connection over TLS to the master that Sentinels name."""


# Connection classes by the scheme of the URL.
KINDS: dict[str, type[Connection | UnixDomainSocketConnection]] = {
    "redis": BulkTCP,
    "rediss": BulkTLS,
    "unix": BulkUnix,
    "redis+sentinel": MasterTCP,
    "rediss+sentinel": MasterTLS,
}


def connection_settings(url: str) -> dict[str, Any]:
    """Return the settings of a redis-py connection to `url`, whose scheme is in KINDS. Raises InvalidSetting.

    The environment may add the files for TLS and the password's file, see `credentials`.
    redis-py's own retries are off, because they repeat what must not be repeated. The caller knows what may be.
    """
    sentinels = None
    try:
        check_form(url)
        plain, sentinels = sentinel.split(url) if sentinel.is_watched(url) else (url, None)
        settings: dict[str, Any] = dict(_parse_url(plain))
    except ValueError as error:
        # Show neither the URL nor urllib's message: where the password of a malformed URL ends is unknown.
        why = f" ({error})" if str(error).startswith("Invalid value for ") else ""
        if re.fullmatch(r"[\w.-]+:[0-9]{1,5}(/[0-9]*)?", url, re.ASCII):  # no password fits into this
            raise InvalidSetting(f"{url} is no URL: did you mean redis://{url}?") from None
        raise InvalidSetting(
            f"not a Redis URL{why}: write redis://HOST:PORT, rediss://HOST:PORT, unix:///PATH or "
            f"redis+sentinel://HOST:PORT,HOST:PORT/NAME; percent-encode all characters of a password but letters and "
            f"digits, as in %40 for @"
        ) from None
    settings.pop("connection_class", None)
    settings = credentials(url, settings)
    settings.setdefault("client_name", client_name())
    # redis-py's own limit is 100: each session that waits holds a connection, and its heartbeat needs another.
    settings.setdefault("max_connections", _NO_LIMIT)
    if settings["max_connections"] < 1:
        raise InvalidSetting(f"{redacted(url)}: max_connections must be 1 or more")
    settings.setdefault("socket_timeout", min(SOCKET_TIMEOUT_S, patience.patience_s()))
    if not settings["socket_timeout"] > 0:
        raise InvalidSetting(f"{redacted(url)}: socket_timeout must be more than 0 seconds")
    if not url.startswith("unix:"):
        settings.setdefault("socket_connect_timeout", CONNECT_TIMEOUT_S)
    if over_tls(url):
        settings.setdefault("ssl_cert_reqs", "required")
        settings.setdefault("ssl_check_hostname", True)
    if sentinels:
        settings |= {"sentinels": sentinels, "host": str(sentinels)}  # each connection puts the master's host there
        if over_tls(url):
            sentinels.trust(settings)
    settings |= {"protocol": 2, "retry": Retry(NoBackoff(), 0), "command_packer": _Packer}
    try:  # redis-py itself checks the options only when it connects, in the middle of a command
        KINDS[url.split(":", 1)[0]](**{name: v for name, v in settings.items() if name != "max_connections"})
    except (TypeError, ValueError, RedisError) as error:
        raise InvalidSetting(
            f"{redacted(url)} has an invalid option: redis-py {str(error).rpartition('() ')[2]}"
        ) from None
    return settings


def client_name() -> str:
    """Return the name of this process's connections in CLIENT LIST, which no other process uses."""
    return f"{_CHILD if launcher.own() else _OURS}{os.getpid()}-{_NONCE}"


def counts_as_user(name: str) -> bool:
    """Return whether a private server keeps running for a client of that name.

    It does not for a process that another one launched: the launcher is connected too as long as it lives, and if it is
    killed, processes that it leaves behind must not keep the server running.
    """
    return name.startswith(_OURS) and not name.startswith(_CHILD)


class ArrayPool:
    """Connections that move chunks. Each call takes one of its own, so that threads do not wait for each other."""

    def __init__(self, url: str, **others: Any) -> None:
        """`others` are settings of the connections that go before those of the URL."""
        settings = connection_settings(url) | others | {"parser_class": _PythonParser}
        self._pool = ConnectionPool(connection_class=cast(Any, KINDS[url.split(":", 1)[0]]), **settings)
        self._idle: deque[Any] = deque()  # the last one used is the first one taken
        self.closed = False

    @contextmanager
    def putting(
        self, stored: Stored | None = None, copies: Copies = NONE, refused: Refused = lambda key, error: False
    ) -> Iterator[Put]:
        """Yield a `Put` that never fails: leaving the block raises redis-py's ResponseError (OOM, READONLY ...) for the
        first that was refused, and its ConnectionError or TimeoutError after a cut: then any of the values may have
        been stored.

        `stored` is called with each key for which the server has answered OK, and once the replicas that `copies` asks
        for have its value too. `refused` is called with each key that was refused; leaving the block does not raise
        what it returns True for.
        """
        failed: RedisError | None = None
        waiting: deque[str] = deque()
        confirmed: list[str] = []
        confirms = confirmed.append if copies.least else stored

        with self.using() as connection:

            def confirm() -> None:
                nonlocal failed
                key = waiting.popleft()
                try:
                    cast(Any, connection).read_response()
                except ResponseError as error:
                    if not refused(key, error):
                        failed = failed or error
                else:
                    if confirms:
                        confirms(key)

            def put(key: str, value: Buffers) -> None:
                nonlocal failed
                if failed and not isinstance(failed, ResponseError):
                    return
                try:
                    # Also before the window is full: if a slow link is cut, it must be known which values arrived.
                    while waiting and (len(waiting) == _SET_WINDOW or cast(Any, connection).can_read()):
                        confirm()
                    connection.write_set(key, value)
                    waiting.append(key)
                except RedisError as error:
                    failed = error

            yield Put(put)
            if failed and not isinstance(failed, ResponseError):
                raise failed
            while waiting:
                confirm()
            if confirmed:
                copies.check(connection.exchange(copies.asked(), ())[0])
        if stored:
            for key in confirmed:
                stored(key)
        if failed:
            raise failed

    def getting(self, items: Sequence[tuple[str, memoryview]]) -> Generator[None, None, None]:
        """GET each key into its buffer, and yield when each is filled; only then is the next one written to.

        Raises ChunkGone if a key is missing or of another length (the buffers' contents are then undefined), and
        redis-py's errors as they come.
        """
        with self.using() as connection:
            yield from connection.getting(items)

    def exchange(
        self, commands: Sequence[Command], gets: Sequence[tuple[str, memoryview]] = ()
    ) -> tuple[list[Any], list[bool]]:
        """Send several commands in one piece on one connection: see `_Bulk.exchange`."""
        with self.using() as connection:
            return connection.exchange(commands, gets)

    def copies_of(self, key: str, copies: Copies) -> Copies:
        """Return which copies there must be of what is stored under a key, where `copies` may be IF_ANY."""
        return NONE if copies == IF_ANY else copies

    def using(self) -> _Using:
        """Return a block that has a connection of the pool for itself. It closes it if it is left by any exception, an
        interrupt included. Raises ClosedHere after `close`."""
        return _Using(self)

    def take(self) -> _Bulk:
        """Return a connection that no other call uses. Raises ClosedHere after `close`."""
        if self.closed:
            raise ClosedHere("the connections were closed here")
        connection: _Bulk = self._idle_connection() or cast(Any, self._pool.get_connection())
        return connection

    def drop(self, connection: Any) -> None:
        """Close a connection on which something went wrong, and all that are idle: these may have been cut too."""
        self._give_back(connection)
        while other := self._idle_connection():
            self._give_back(other)

    def keep(self, connection: Any) -> None:
        """Keep it for the next call. Close one other that was not used for long: a burst of calls may be over."""
        connection.used_at = now = time.monotonic()
        self._idle.append(connection)
        if self.closed:  # another thread has closed the pool meanwhile
            self._pool.disconnect()
        try:
            if now - self._idle[0].used_at > _UNUSED_S:
                self._give_back(self._idle.popleft())
        except IndexError:  # another thread took it
            return

    def _idle_connection(self) -> Any:
        """Return a connection used before. redis-py's pool would first ask the kernel, in 3 calls, whether it lives."""
        while self._idle:
            try:
                connection = self._idle.pop()
            except IndexError:  # another thread took it
                break
            if connection.pid == os.getpid():  # a fork does not use its parent's
                return connection
        return None

    def _give_back(self, connection: Any) -> None:
        connection.disconnect()
        self._pool.release(connection)

    def close(self) -> None:
        """Close all connections."""
        self.closed = True
        self._pool.disconnect()


class _Using:
    """See `ArrayPool.using`. A generator as a context manager takes twice as long, in every request."""

    def __init__(self, pool: ArrayPool) -> None:
        self._pool = pool

    def __enter__(self) -> _Bulk:
        self._connection = self._pool.take()
        return self._connection

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind:
            self._pool.drop(self._connection)
        else:
            self._pool.keep(self._connection)


def _coalesced(pieces: Sequence[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    """Yield the same bytes with neighbouring small pieces joined, so that 160 tensors cost few system calls."""
    small: list[bytes | memoryview] = []
    held = 0
    for piece in pieces:
        if len(piece) >= _COALESCE_BYTES:
            if small:
                yield b"".join(small)
                small, held = [], 0
            yield piece
        else:
            small.append(piece)
            held += len(piece)
            if held >= _COALESCE_BYTES:
                yield b"".join(small)
                small, held = [], 0
    if small:
        yield b"".join(small)
