"""Processes on threads that die, or sleep, at a point. What the others see of a process is what it has sent.

So a point is a place between two of its commands. A process here is a thread with connections of its own, and with the
threads that renew its leases or give its signs of life. Once it is dead it sends nothing more, and its connections are
closed, as the kernel closes them; while it sleeps, all that it would send waits. kvps knows nothing of this.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from itertools import count
from typing import Any, NamedTuple
from weakref import WeakSet

from redis.connection import AbstractConnection

import kvps
from kvps.connection.client import Client
from kvps.connection.stand_in import Duty
from kvps.protocol.scripts import SCRIPTS


class Killed(BaseException):
    """Ends the threads of a process that is dead. No code of kvps catches it."""


class Point(NamedTuple):
    """A place among the commands of a process: `before` a command is sent, once it is `sent` and has no reply yet, or
    `after` its reply, before the thread's next command. `words` are in the command."""

    when: str
    words: tuple[str, ...]

    def matches(self, command: bytes) -> bool:
        """Whether this is the command."""
        return all(word.encode() in command for word in self.words)


def _script(when: str, name: str) -> Point:
    return Point(when, (SCRIPTS[name].sha,))


AGGREGATOR = {
    "after the lease": _script("after", "acquire"),
    "after the plan": _script("after", "plan"),
    "after reading": Point("after", ("\r\nGET\r\n", ":g:")),
    "between staged chunks": Point("sent", ("\r\nSET\r\n", ":w:")),
    "before commit": _script("before", "ready"),
    "commit sent": _script("sent", "ready"),
    "commit answered": _script("after", "ready"),
    "during renewal": _script("sent", "renew"),
    "during clean-up": _script("sent", "free"),
}
WORKER = {
    "after joining": _script("after", "join"),
    "between chunks of a push": Point("sent", ("\r\nSET\r\n", ":g:")),
    "before push": _script("before", "push"),
    "push sent": _script("sent", "push"),
    "push answered": _script("after", "push"),
    "while waiting": Point("sent", ("XREAD",)),
    "after waking": Point("after", ("XREAD",)),
}
POINTS = AGGREGATOR | WORKER


_NUMBERS = count()
_PROCESSES: dict[str, Process] = {}


class Process:
    """A process on threads that use its `store`, a store of its own on the server at `url`.

    fate   set once it is dead or asleep
    awake  clear while it sleeps
    """

    def __init__(self, url: str) -> None:
        _install()
        self.dead = False
        self.fate = threading.Event()
        self.awake = threading.Event()
        self.awake.set()
        self._point: Point | None = None
        self._sleeps = False
        self._left = 0
        self._lock = threading.Lock()
        self._this_thread = threading.local()  # .fails: whether its last command is one to fail after
        self._connections: WeakSet[Any] = WeakSet()
        name = f"process-{next(_NUMBERS)}"
        _PROCESSES[name] = self  # its connections bear the name
        self.store = kvps.connect(f"{url}{'&' if '?' in url else '?'}client_name={name}")

    def fail_at(self, point: str, nth: int = 1, sleep: bool = False) -> None:
        """Die, or with `sleep` fall asleep, at the n-th passage of this point."""
        self._point, self._left, self._sleeps = POINTS[point], nth, sleep

    def kill(self) -> None:
        """Die now. A dead process stays dead."""
        self.dead = True
        self.fate.set()
        self.awake.set()
        for connection in list(self._connections):
            with suppress(AttributeError, OSError):  # it is closed already
                connection._sock.shutdown(socket.SHUT_RDWR)

    def send(self, connection: Any, command: bytes, send: Callable[[], None]) -> None:
        """Send a command if the process lives and is awake, and fail if this is the point."""
        self._connections.add(connection)
        if getattr(self._this_thread, "fails", False):
            self._this_thread.fails = False
            self._pass()
        when = self._point.when if self._point and self._point.matches(command) else ""
        if when == "before":
            self._pass()
        self._check()
        send()
        if when == "sent":
            self._pass()
        self._this_thread.fails = when == "after"

    def _check(self) -> None:
        self.awake.wait()
        if self.dead:
            raise Killed

    def _pass(self) -> None:
        with self._lock:
            self._left -= 1
            if self._left:
                return
            if self._sleeps:
                self.awake.clear()
                self.fate.set()
            else:
                self.kill()
        self._check()


@cache
def _install() -> None:
    """Have the commands of each connection that bears a process's name go through the process. This is never undone:
    a late thread of a dead process must not send either."""
    real, report = AbstractConnection.send_packed_command, threading.excepthook

    def send(self: Any, command: Any, check_health: bool = True) -> None:
        if process := _PROCESSES.get(self.client_name):
            data = command.encode() if isinstance(command, str) else b"".join(command)
            process.send(self, data, lambda: real(self, command, check_health))
        else:
            real(self, command, check_health)

    def unless_killed(arguments: threading.ExceptHookArgs) -> None:
        if arguments.exc_type is not Killed:
            report(arguments)

    begin = Duty.__init__

    def alone(self: Duty, client: Client, every_s: float) -> None:
        begin(self, client, every_s)
        if "client_name=process-" in client.url:  # its stand-in would see that the process of the tests lives
            self.end()

    Duty.__init__ = alone  # type: ignore[method-assign]
    AbstractConnection.send_packed_command = send  # type: ignore[method-assign]
    threading.excepthook = unless_killed
