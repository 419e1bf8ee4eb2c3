"""Commands as bytes, and replies from bytes: the part of RESP2 that a request needs. Pure but for `receive`.

redis-py does this too, but through its retries, events, metrics and buffers. For a small model those take most of the
time of a round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from redis.exceptions import InvalidResponse, RedisError

_READ_BYTES = 16 << 10

Command = Sequence[Any]
"""Name and arguments: text, numbers, or a list of pieces of memory that form one value."""


def packed(command: Command) -> bytes:
    """Return the bytes of a command as they are sent."""
    words = [*str(command[0]).split(" "), *command[1:]]  # as in "SCRIPT LOAD"
    data = [b"".join(word) if isinstance(word, list) else str(word).encode() for word in words]
    return b"".join([b"*%d\r\n" % len(data), *[b"$%d\r\n%b\r\n" % (len(word), word) for word in data]])


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
            return self._reply(self._line())
        except ValueError as error:
            raise InvalidResponse(f"not a reply: {error}") from None

    def fill(self, target: memoryview) -> Any:
        """Read a value into `target` and return True, if it has that length; else return the reply as `next` does."""
        line = self._line()
        if line != b"$%d" % target.nbytes:
            return self._reply(line)
        got = min(target.nbytes, len(self._data) - self._at)
        target[:got] = self._data[self._at : self._at + got]
        self._at += got
        while got < target.nbytes:
            got += self._receive(target[got:])
        if self._line():
            raise InvalidResponse("a chunk did not end where its length says")
        return True

    def end(self) -> None:
        """Raise InvalidResponse if more bytes arrived than were asked for."""
        if self._at != len(self._data):
            raise InvalidResponse(f"more than was asked for: {self._data[self._at : self._at + 80]!r}")

    def _reply(self, line: bytes) -> Any:
        kind, rest = line[:1], line[1:]
        if kind == b"$":
            length = int(rest)
            return None if length < 0 else self._text(length)
        if kind == b"*":
            length = int(rest)
            return None if length < 0 else [self._reply(self._line()) for _ in range(length)]
        if kind == b":":
            return int(rest)
        if kind == b"+":
            return rest.decode()
        if kind == b"-":
            return self._error(rest.decode(errors="replace"))
        raise InvalidResponse(f"not a reply: {line[:80]!r}")

    def _line(self) -> bytes:
        while (end := self._data.find(b"\r\n", self._at)) < 0:
            self._more()
        line, self._at = self._data[self._at : end], end + 2
        return line

    def _text(self, length: int) -> str:
        end = self._at + length
        while len(self._data) < end + 2:
            end -= self._at
            self._more()
        text, self._at = self._data[self._at : end].decode(), end + 2
        return text

    def _more(self) -> None:
        piece = bytearray(_READ_BYTES)
        self._data, self._at = self._data[self._at :] + piece[: self._receive(piece)], 0
