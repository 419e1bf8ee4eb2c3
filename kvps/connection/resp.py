"""Commands as bytes, and replies from bytes: RESP2, by hiredis. Pure but for `receive`.

redis-py does this too, but through its retries, events, metrics and buffers. For a small model those take most of the
time of a round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import hiredis
from redis.exceptions import InvalidResponse, RedisError

_READ_BYTES = 16 << 10
ANY_BYTES = "surrogateescape"  # a name that is no text can still be sent back, as to delete it

_AS_IS = {str, bytes}
_pack: Callable[[tuple[Any, ...]], bytes] = hiredis.pack_command  # its stubs know only tuples of one item

Command = Sequence[Any]
"""Name and arguments: text, numbers, or a list of pieces of memory that form one value."""


def packed(command: Command) -> bytes:
    """Return the bytes of a command as they are sent."""
    words = (*command[0].split(), *command[1:])  # two words in "SCRIPT LOAD"
    # hiredis (3.5) gets no numbers: it has Python write them, which answers NULL when a handler of a signal raises
    # there, and reads from that address.
    if not _AS_IS.issuperset(map(type, words)):
        words = tuple([word if word.__class__ is str else _word(word) for word in words])
    try:
        return _pack(words)
    except UnicodeEncodeError:  # a name that is no text
        return _pack(tuple(map(_word, words)))


def _word(word: Any) -> bytes:
    if isinstance(word, bytes):
        return word
    return b"".join(word) if isinstance(word, list) else str(word).encode(errors=ANY_BYTES)


def granted(replies: Sequence[Any]) -> list[Any]:
    """Return the replies to several commands. Raises the first that is an error."""
    for reply in replies:
        if isinstance(reply, Exception):
            raise reply
    return list(replies)


class Replies:
    """The replies to all commands sent on one connection, one after the other.

    `receive` fills a part of a buffer with bytes that arrive, and returns how many. `error` returns the error of an
    error reply, or raises it.
    """

    def __init__(self, receive: Callable[[bytearray], int], error: Callable[[str], RedisError]) -> None:
        self._receive = receive
        self._reader: Any = hiredis.Reader(
            protocolError=InvalidResponse, replyError=error, encoding="utf-8", errors=ANY_BYTES
        )
        self._piece = bytearray(_READ_BYTES)

    def next(self, decodes: bool = True) -> Any:
        """Return the next reply: text (bytes unless it `decodes`), a number, None, a list of those, or an error."""
        while (reply := self._reader.gets(decodes)) is False:  # it is not whole
            self._reader.feed(self._piece, 0, self._receive(self._piece))
        return reply

    def fill(self, target: memoryview) -> Any:
        """Read a value into `target` and return True, if it has that length; else return the reply."""
        reply = self.next(decodes=False)
        if not isinstance(reply, bytes) or len(reply) != target.nbytes:
            return reply
        target[:] = reply
        return True

    def end(self) -> None:
        """Raise InvalidResponse if more bytes arrived than were asked for."""
        if self._reader.has_data():
            raise InvalidResponse(f"more than was asked for: {self._reader.gets(False)!r}")
