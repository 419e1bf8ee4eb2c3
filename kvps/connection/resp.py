"""Commands as bytes, and replies from bytes: the part of RESP2 that a request needs. Pure but for `receive`.

redis-py does this too, but through its retries, events, metrics and buffers. For a small model those take most of the
time of a round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from redis.exceptions import InvalidResponse, RedisError

_READ_BYTES = 16 << 10
_ANY_BYTES = ("utf-8", "surrogateescape")  # a name that is no text can still be sent back, as to delete it

Command = Sequence[Any]
"""Name and arguments: text, numbers, or a list of pieces of memory that form one value."""


_CONSTANT = frozenset(["MULTI", "EXEC", "HGETALL", "HGET", "HMGET", "HLEN", "ZRANGE", "ZSCORE", "ZCARD", "XREVRANGE"])
"""Reads that a process repeats in every round with the same arguments: keys of its job, and itself."""


def packed(command: Command) -> bytes:
    """Return the bytes of a command as they are sent."""
    return _packed_once(*command) if command[0] in _CONSTANT else _packed(*command)


def _packed(name: str, *arguments: Any) -> bytes:
    data = name.encode().split()  # two words in "SCRIPT LOAD"
    try:
        data += [b"".join(word) if isinstance(word, list) else str(word).encode() for word in arguments]
    except UnicodeEncodeError:
        data += [b"".join(word) if isinstance(word, list) else str(word).encode(*_ANY_BYTES) for word in arguments]
    return b"*%d\r\n" % len(data) + b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in data])


_packed_once = lru_cache(4096, typed=True)(_packed)  # typed: 1 == True, but they are sent as 1 and True


class Replies:
    """The replies to all commands sent on one connection, one after the other.

    `receive` fills a part of a buffer with bytes that arrive, and returns how many. `error` returns the error of an
    error reply, or raises it.
    """

    def __init__(self, receive: Callable[[bytearray | memoryview], int], error: Callable[[str], RedisError]) -> None:
        self._receive = receive
        self._error = error
        self._data = b""
        self._at = 0

    def next(self) -> Any:
        """Return the next reply: text, a number, None, a list of those, or an error."""
        try:
            return self._reply()
        except (ValueError, RecursionError) as error:
            raise InvalidResponse(f"not a reply: {error}") from None

    def fill(self, target: memoryview) -> Any:
        """Read a value into `target` and return True, if it has that length; else return the reply as `next` does."""
        end = self._line_end()
        if self._data[self._at : end] != b"$%d" % target.nbytes:
            return self.next()
        self._at = end + 2
        got = min(target.nbytes, len(self._data) - self._at)
        target[:got] = self._data[self._at : self._at + got]
        self._at += got
        while got < target.nbytes:
            got += self._receive(target[got:])
        if self._line_end() != self._at:
            raise InvalidResponse("a chunk did not end where its length says")
        self._at += 2
        return True

    def end(self) -> None:
        """Raise InvalidResponse if more bytes arrived than were asked for."""
        if self._at != len(self._data):
            raise InvalidResponse(f"more than was asked for: {self._data[self._at : self._at + 80]!r}")

    def _reply(self) -> Any:
        if (end := self._data.find(b"\r\n", self._at)) < 0:
            end = self._line_end()
        at, self._at = self._at, end + 2
        kind, rest = self._data[at : at + 1], self._data[at + 1 : end]
        if kind == b"$":
            return None if (length := int(rest)) < 0 else self._text(length)
        if kind == b"*":
            return None if (length := int(rest)) < 0 else [self._reply() for _ in range(length)]
        if kind == b":":
            return int(rest)
        if kind == b"+":
            return rest.decode()
        if kind == b"-":
            return self._error(rest.decode(errors="replace"))
        raise InvalidResponse(f"not a reply: {(kind + rest)[:80]!r}")

    def _line_end(self) -> int:
        """Return where the line that begins here ends, once it is there."""
        while (end := self._data.find(b"\r\n", self._at)) < 0:
            self._receive_more()
        return end

    def _text(self, length: int) -> str:
        if len(self._data) < self._at + length + 2:
            self._receive_value(length)
        start, self._at = self._at, self._at + length + 2
        data = self._data[start : start + length]
        try:
            return data.decode()
        except UnicodeDecodeError:
            return data.decode(*_ANY_BYTES)

    def _receive_value(self, length: int) -> None:
        if self._at + length - len(self._data) > _READ_BYTES:
            self._receive_large(length)
        while len(self._data) < self._at + length + 2:
            self._receive_more()

    def _receive_more(self) -> None:
        piece = bytearray(_READ_BYTES)
        self._data, self._at = self._data[self._at :] + piece[: self._receive(piece)], 0

    def _receive_large(self, length: int) -> None:
        """Receive a value into memory of its size. Adding it piece by piece would copy all of it for each piece."""
        value, got = bytearray(length), len(self._data) - self._at
        value[:got] = self._data[self._at :]
        while got < length:
            got += self._receive(memoryview(value)[got:])
        self._data, self._at = bytes(value), 0
