"""A process that keeps this one's signs of life going while its own threads stand still.

A library that holds the interpreter's lock, while it reads a large file or compiles, stops every thread of the
process, and the process is silent although it lives. So it tells its stand-in each time what it has sent. If it is
late, the stand-in sends that again, as long as the process is neither dead nor stopped (see `stand_in_process`). Only
on Linux can it tell that, so elsewhere there is no stand-in.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import select
import subprocess
import sys
import threading
from collections.abc import Sequence
from itertools import count
from pathlib import Path

from kvps.connection.client import Client
from kvps.connection.resp import Command

log = logging.getLogger("kvps.connection")

_PROGRAM = Path(__file__).with_name("stand_in_process.py")
_TAKES_MS = 1000
_numbers = count()


class Duty:
    """Commands that the server must get from this process again and again, at least every `every_s` seconds."""

    def __init__(self, client: Client, every_s: float) -> None:
        self._number = next(_numbers)
        self._server = (client.url, client.is_cluster)
        self._every_s = every_s
        self._stand_in = _stand_in
        self._stand_in.begin(self._number)

    def done(self, commands: Sequence[Command]) -> None:
        """Note that this process has just sent these commands itself, and that they are the ones to be sent again."""
        self._stand_in.tell(self._number, f"{self._every_s:g} {json.dumps([*self._server, commands])}")

    def end(self) -> None:
        """Let the server hear nothing more of this."""
        self._stand_in.end(self._number)


class StandIn:
    """The stand-in of this process. It runs while there are duties, and a little longer. May be used from several
    threads."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a dropped session ends its duty wherever it is collected
        self._duties: set[int] = set()
        self._process: subprocess.Popen[bytes] | None = None

    def begin(self, duty: int) -> None:
        """Take a duty on."""
        with self._lock:
            self._duties.add(duty)

    def tell(self, duty: int, sent: str) -> None:
        """Say what was sent for a duty, unless that has ended."""
        with self._lock:
            if duty in self._duties and not self._say(f"{duty} {sent}"):
                self.close()
                self._process = _started()
                self._say(f"{duty} {sent}")

    def end(self, duty: int) -> None:
        """End a duty."""
        with self._lock:
            self._duties.discard(duty)
            self._say(f"{duty}")

    def _say(self, line: str) -> bool:
        """Return whether the process has taken a line: it may have ended, or have stopped reading."""
        if self._process is None or self._process.stdin is None:
            return False
        message = f"{line}\n".encode()
        pipe, ready = self._process.stdin.fileno(), select.poll()
        ready.register(pipe, select.POLLOUT)
        try:
            while message and ready.poll(_TAKES_MS):
                message = message[os.write(pipe, message) :]
        except OSError:
            return False
        return not message

    def close(self) -> None:
        """End the process, as this one does at its end."""
        with self._lock:
            if self._process and self._process.stdin:
                self._process.kill()
                self._process.stdin.close()
                self._process.wait()
                self._process = None


def _started() -> subprocess.Popen[bytes] | None:
    """Start the process. Return None where there can be none: this process is then silent when its threads are."""
    if sys.platform != "linux" or getattr(sys, "frozen", False):
        return None
    try:
        # In a session of its own, so that Ctrl-C in the terminal does not end it before this process has left.
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_PROGRAM), str(os.getpid()), os.pathsep.join(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError as error:
        log.debug("no stand-in could be started: %s", error)
        return None
    assert process.stdin is not None
    os.set_blocking(process.stdin.fileno(), False)
    return process


_stand_in = StandIn()
_of_parents: list[StandIn] = []  # a fork keeps its parent's, which it must not end


def _begin_anew() -> None:
    global _stand_in
    _of_parents.append(_stand_in)
    _stand_in = StandIn()


os.register_at_fork(after_in_child=_begin_anew)
atexit.register(lambda: _stand_in.close())
