"""The points at which a child kills itself or puts itself to sleep, at its n-th passage.

kvps knows nothing of them: in the child the method or the connection is wrapped. The child notes the point in a file
before it sends itself the signal, so every fault that is counted was really injected.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

from kvps_aggregator.shard.fetch import ContributionFetch
from kvps_aggregator.shard.storage_shm import Mirror
from kvps_aggregator.step.shard_arrays import ShardArrays
from redis.connection import AbstractConnection

from kvps.connection.client import Client
from kvps.protocol import scripts
from kvps.protocol.scripts import JobScripts
from kvps.session.session import Session
from kvps.transport.shared_memory import Segments, WritableSegment
from kvps.transport.shm import ShmUpload


class Fuse:
    """A counter of passages that sends the signal at the n-th."""

    def __init__(self, point: str, nth: int, number: int, notes: str) -> None:
        self._left = nth
        self._line = f"{point}\n".encode()
        self._signal = number
        self._notes = notes
        self._lock = threading.Lock()

    def __call__(self) -> None:
        with self._lock:
            self._left -= 1
            if self._left:
                return
            note(self._notes, self._line)
            os.kill(os.getpid(), self._signal)


def note(path: str, line: bytes) -> None:
    """Append one line in one write: a kill leaves the whole line or none of it."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(file, line)
    finally:
        os.close(file)


Install = Callable[[Callable[[], None]], None]


def _before(kind: Any, method: str) -> Install:
    def install(fuse: Callable[[], None]) -> None:
        real = getattr(kind, method)

        def wrapped(*args: Any, **named: Any) -> Any:
            fuse()
            return real(*args, **named)

        setattr(kind, method, wrapped)

    return install


def _after(kind: type, method: str, counts: Callable[[Any], bool] = lambda result: True) -> Install:
    def install(fuse: Callable[[], None]) -> None:
        real = getattr(kind, method)

        def wrapped(*args: Any, **named: Any) -> Any:
            result = real(*args, **named)
            if counts(result):
                fuse()
            return result

        setattr(kind, method, wrapped)

    return install


def _sent(*words: str, script: str = "") -> Install:
    """Fire after a command that holds all these words is handed to the kernel, before its reply is read."""

    def install(fuse: Callable[[], None]) -> None:
        real = AbstractConnection.send_packed_command
        wanted = [word.encode() for word in words] + ([scripts.SCRIPTS[script].sha.encode()] if script else [])

        def wrapped(self: Any, command: Any, check_health: bool = True) -> None:
            real(self, command, check_health)
            data = command.encode() if isinstance(command, str) else b"".join(command)
            if all(word in data for word in wanted):
                fuse()

        AbstractConnection.send_packed_command = wrapped  # type: ignore[method-assign]

    return install


def _each(*installs: Install) -> Install:
    """Fire at each of these, as one point."""

    def install(fuse: Callable[[], None]) -> None:
        for one in installs:
            one(fuse)

    return install


WORKER: dict[str, Install] = {
    "before push": _before(Session, "push"),
    "between chunks of a push": _sent("\r\nSET\r\n", ":g:"),
    "push sent, no reply yet": _sent(script="push"),
    "push answered": _after(JobScripts, "push"),
    "after joining": _after(JobScripts, "join"),
    "while waiting": _sent("XREAD"),
    "after waking": _each(_after(Client, "wait"), _after(Client, "wait_and_read")),
}
AGGREGATOR: dict[str, Install] = {
    "after the lease": _after(JobScripts, "acquire", lambda taken: bool(taken[0])),
    "after the plan": _after(JobScripts, "plan", lambda planned: planned.plan is not None),
    "after reading": _before(ContributionFetch, "check"),
    "after reducing": _after(ShardArrays, "step"),
    "between staged chunks": _sent("\r\nSET\r\n", ":w:"),
    "before commit": _before(JobScripts, "ready"),
    "commit sent, no reply yet": _sent(script="ready"),
    "commit answered": _after(JobScripts, "ready"),
    "during renewal": _sent(script="renew"),
    "during clean-up": _sent(script="free"),
}
_OVER_REDIS = ("between chunks of a push", "between staged chunks")
SHARED_WORKER: dict[str, Install] = {
    **{point: install for point, install in WORKER.items() if point not in _OVER_REDIS},
    "a gradient's segment without bytes": _before(os, "posix_fallocate"),
    "a gradient's segment renamed": _after(WritableSegment, "renamed", bool),
    "between chunks copied": _after(ShmUpload, "send"),
}
SHARED_AGGREGATOR: dict[str, Install] = {
    **{point: install for point, install in AGGREGATOR.items() if point not in _OVER_REDIS},
    "a version's segment without bytes": _before(os, "posix_fallocate"),
    "a version's segment renamed": _after(WritableSegment, "renamed", bool),
    "between segments of a version": _after(Segments, "make"),
    "between chunks of the mirror": _sent("\r\nSET\r\n", ":w:"),
    "before the mirror is noted": _before(Mirror, "_note"),
    "mirror sent, no reply yet": _sent(script="mirror"),
}
SHARED = {"workers": [*SHARED_WORKER], "aggregators": [*SHARED_AGGREGATOR]}
"""The points of a job over shared memory; and those of them that exist nowhere else."""
SHARED_ALONE = {role: [p for p in found if p not in WORKER | AGGREGATOR] for role, found in SHARED.items()}
_FEW = {"after joining": 1, "after the lease": 1, "during renewal": 3, "while waiting": 5, "after waking": 5}
_FEW |= {"a gradient's segment without bytes": 1, "a version's segment without bytes": 4}
_FEW |= {"before the mirror is noted": 5, "mirror sent, no reply yet": 5}
"""Points that are passed less often than once a round -> the most passages to wait for."""


def passages(point: str, most: int) -> int:
    """Return the most passages after which a child may be killed there."""
    return min(_FEW.get(point, most), most)


def arm(point: str, nth: int, number: int, notes: str) -> None:
    """Have this process send itself signal `number` when it passes `point` for the `nth` time."""
    (WORKER | AGGREGATOR | SHARED_WORKER | SHARED_AGGREGATOR)[point](Fuse(point, nth, number, notes))
