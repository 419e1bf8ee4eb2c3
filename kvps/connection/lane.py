"""Sends arrays to one node of a cluster, by a thread of its own, while others go to other nodes."""

from __future__ import annotations

import queue
import threading
from concurrent.futures import Future
from contextlib import suppress

from redis.exceptions import AskError, ResponseError

from kvps.arrays.digest import Buffers
from kvps.connection.replicas import Copies
from kvps.connection.sockets import ArrayPool, Stored

_LOOK_S = 0.1  # between two looks whether the thread has failed


class Lane:
    """The SETs that go to one node, sent by a thread of its own.

    refused  key, value and error of what another node has
    """

    def __init__(self, pool: ArrayPool, stored: Stored | None, copies: Copies) -> None:
        self.refused: list[tuple[str, Buffers, ResponseError]] = []
        self._items: queue.SimpleQueue[tuple[str, Buffers] | threading.Event | None] = queue.SimpleQueue()
        self._values: dict[str, Buffers] = {}
        self._dropped = False
        self._done: Future[None] = Future()  # an interrupted Thread.join of Python 3.11 takes the thread for ended
        threading.Thread(target=self._run, args=(pool, stored, copies), name="kvps-put", daemon=True).start()

    def send(self, key: str, value: Buffers) -> None:
        self._values[key] = value
        self._items.put((key, value))

    def mark(self) -> threading.Event:
        """Return an event that is set when all that was sent has left the memory it was in."""
        reached = threading.Event()
        self._items.put(reached)
        return reached

    def wait(self, reached: threading.Event) -> None:
        """Wait for a mark. Returns too if the thread has failed; `result` raises why."""
        while not reached.wait(_LOOK_S) and not self._done.done():
            pass

    def end(self) -> None:
        """Let the thread end when all is stored or refused."""
        self._items.put(None)

    def drop(self) -> None:
        """Let the thread end after the chunk that it sends, and close the connection."""
        self._dropped = True
        self._items.put(None)

    def join(self) -> None:
        """Wait until the thread has ended."""
        self._done.exception()

    def result(self) -> None:
        """Wait until the thread has ended. Raises redis-py's errors."""
        self._done.result()

    def _run(self, pool: ArrayPool, stored: Stored | None, copies: Copies) -> None:
        try:
            with suppress(_Dropped), pool.putting(stored, copies, self._refuse) as put:
                while (item := self._items.get()) is not None and not self._dropped:
                    if isinstance(item, threading.Event):
                        item.set()
                    else:
                        put(*item)
                if self._dropped:
                    raise _Dropped
            self._done.set_result(None)
        except BaseException as error:
            self._done.set_exception(error)

    def _refuse(self, key: str, error: ResponseError) -> bool:
        """Note what another node has. Return whether that is why it was refused."""
        if not isinstance(error, AskError):
            return False
        self.refused.append((key, self._values[key], error))
        return True


class _Dropped(Exception):
    """Raised to close a connection in the middle of sending."""
