"""The stand-in of another process: see `stand_in`.

It is run by file name, not imported: it must start at once and take little room, because it is seldom needed. So it
imports kvps, and connects, only when it has something to send, and nothing else that takes time: `json` or `typing`
would double its start.

Its arguments are the process that it stands in for, which started it, and where modules are. On standard input it reads
a line for each thing it is told: the number of a duty that has ended; or, with spaces in between, the number, the
seconds between two times, and what was sent just now, as JSON: [url, whether that is a cluster, commands].
"""

from __future__ import annotations

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


class Duty:
    """What must be sent again every `every_s` seconds. `due` is when; `is_late` says that it was not."""

    def __init__(self, every_s: float, sent: bytes) -> None:
        self.every_s, self.sent = every_s, sent
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

    def hear(self, line: bytes) -> None:
        """Note what the process has sent, or that a duty has ended."""
        number, *sent = line.split(b" ", 2)
        if sent:
            self._duties[int(number)] = Duty(float(sent[0]), sent[1])
        else:
            self._duties.pop(int(number), None)
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
        url, is_cluster, commands = import_module("json").loads(duty.sent)
        errors = import_module("kvps.errors")
        try:
            self._client(url, is_cluster).each(commands)  # what is refused, as to an evicted worker, the process hears
        except errors.KvpsError:  # the server is away, or a file of its TLS or its password: the next time
            if client := self._clients.pop(url, None):
                client.close()

    def _client(self, url: str, is_cluster: bool) -> Any:
        if url not in self._clients:
            kind = (
                import_module("kvps.connection.cluster").ClusterClient
                if is_cluster
                else import_module("kvps.connection.client").Client
            )
            self._clients[url] = kind(url, _PATIENCE_S)
        return self._clients[url]


def _lives(pid: int) -> bool:
    """Return whether a process runs or waits, and is neither stopped nor dead."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "tTxXZ"
    except OSError:
        return False


def main() -> None:
    parent, sys.path[:] = int(sys.argv[1]), sys.argv[2].split(os.pathsep)
    stand_in, text = StandIn(), b""
    while os.getppid() == parent:
        if select.select([0], [], [], stand_in.wait_s)[0]:
            piece = os.read(0, 1 << 16)
            if not piece:
                return
            *lines, text = (text + piece).split(b"\n")
            for line in lines:
                stand_in.hear(line)
        elif not stand_in.is_needed:
            return
        stand_in.send(_lives(parent))


if __name__ == "__main__":
    main()
