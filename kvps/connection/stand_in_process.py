"""The stand-in of another process: see `stand_in`.

It is run by file name, not imported: it must start at once and take little room, because it is seldom needed. So it
imports kvps, and connects, only when it has something to send, and nothing else that takes time: `json` and `typing`
would more than double its start.

Its arguments are the process that it stands in for, which started it, and where modules are. On standard input it reads
what `framed` returns: the number of a duty, and None if that has ended, or else what was sent for it just now: [url,
whether that is a cluster, seconds between two times, commands].
"""

from __future__ import annotations

import marshal
import os
import select
import sys
import time
from importlib import import_module

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_LATE = 2  # times the time between two times
_PATIENCE_S = 1.0
_LINGER_S = 2.0  # without a duty: the next session begins without a new process
_HEAD = 4  # bytes that say how long a message is


def framed(number: int, sent: list[Any] | None) -> bytes:
    """Return what the process says of a duty."""
    message = marshal.dumps((number, sent))
    return len(message).to_bytes(_HEAD, "big") + message


class Duty:
    """What must be sent again every `every_s` seconds. `due` is when; `is_late` says that it was not."""

    def __init__(self, url: str, is_cluster: bool, every_s: float, commands: list[Any]) -> None:
        self.url, self.is_cluster, self.every_s, self.commands = url, is_cluster, every_s, commands
        self.due = time.monotonic() + _LATE * every_s
        self.is_late = False


class StandIn:
    """The duties, and a client for each server to which something was sent."""

    def __init__(self) -> None:
        self._duties: dict[int, Duty] = {}
        self._clients: dict[str, Any] = {}

    @property
    def is_needed(self) -> bool:
        """Whether there is a duty."""
        return bool(self._duties)

    @property
    def wait_s(self) -> float:
        """How long there is nothing to send."""
        due = [duty.due for duty in self._duties.values()]
        return max(0.0, min(due) - time.monotonic()) if due else _LINGER_S

    def hear(self, number: int, sent: list[Any] | None) -> None:
        """Note what the process has sent, or that a duty has ended."""
        if sent is None:
            self._duties.pop(number, None)
        else:
            self._duties[number] = Duty(*sent)
        if not any(duty.is_late for duty in self._duties.values()):
            for client in self._clients.values():
                client.close()
            self._clients.clear()

    def send(self, lives: bool) -> None:
        """Send what is due, if the process lives."""
        now = time.monotonic()
        for duty in self._duties.values():
            if duty.due <= now:
                duty.due, duty.is_late = now + duty.every_s, True
                if lives:
                    self._send(duty)

    def _send(self, duty: Duty) -> None:
        errors = import_module("kvps.errors")
        try:
            self._client(duty).each(duty.commands)  # what is refused, as to an evicted worker, the process hears itself
        except errors.KvpsError:  # the server is away: the next time
            self._clients.pop(duty.url).close()

    def _client(self, duty: Duty) -> Any:
        if duty.url not in self._clients:
            module, name = ("cluster", "ClusterClient") if duty.is_cluster else ("client", "Client")
            kind = getattr(import_module(f"kvps.connection.{module}"), name)
            self._clients[duty.url] = kind(duty.url, _PATIENCE_S)
        return self._clients[duty.url]


def _lives(pid: int) -> bool:
    """Return whether a process runs or waits, and is neither stopped nor dead."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "tTxXZ"
    except OSError:
        return False


def main() -> None:
    parent, sys.path[:] = int(sys.argv[1]), sys.argv[2].split(os.pathsep)
    stand_in, said = StandIn(), b""
    while os.getppid() == parent:
        if select.select([0], [], [], stand_in.wait_s)[0]:
            piece = os.read(0, 1 << 16)
            if not piece:
                return
            said += piece
            while len(said) >= (end := _HEAD + int.from_bytes(said[:_HEAD], "big")) > _HEAD:
                stand_in.hear(*marshal.loads(said[_HEAD:end]))
                said = said[end:]
        elif not stand_in.is_needed:
            return
        stand_in.send(_lives(parent))


if __name__ == "__main__":
    main()
