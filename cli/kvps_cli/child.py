"""A process that a command starts and watches, and the lines that it prints."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

SUSPENDED = os.EX_TEMPFAIL
"""The exit code of a process whose job was told to stop, and may be resumed."""


@dataclass
class Child:
    """One process of the job. A restarted process is the same child."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    process: subprocess.Popen[bytes]
    mark: str
    heard: threading.Event  # set when it has ended and its output was read
    own: bool  # a command of kvps, not a program of the user
    killed_by: str = ""  # what sent the signal, if known
    version: int = 0
    fruitless: int = 0
    judged: bool = False  # `finished` and `evicted` are known, because its end was looked at
    finished: bool = False  # its worker has done all rounds of all jobs that are there
    goes_on: bool = False  # the script may all the same have more to do
    evicted: bool = False  # its worker was evicted while it ran
    leaving: float = 0.0  # when it was asked to leave; 0 if it was not
    recalled: bool = False  # it is wanted again, once it has left
    retried: bool = False  # it ended with an error, and is started again
    bar: str = ""  # the newest text that it has drawn over an earlier one, as a progress bar

    def __str__(self) -> str:
        return f"{self.name} (process {self.process.pid})"

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    @property
    def code(self) -> int | None:
        """Its returncode as in Popen, negative for a signal; None until it has ended and its output was read."""
        return self.process.poll() if self.heard.is_set() else None

    @property
    def restarts(self) -> bool:
        """Whether it is restarted: a signal ended it before its worker had finished, or it ended with an error because
        its worker was evicted, or with one of its own of which so many are forgiven. If it was asked to leave: whether
        it is wanted again."""
        if self.leaving:
            return self.recalled
        over = self.finished and not self.goes_on
        return self.retried or (not over and ((self.code or 0) < 0 or (self.evicted and bool(self.code))))

    @property
    def done(self) -> bool:
        """Whether it has ended and is not restarted."""
        return self.code is not None and self.judged and not self.restarts

    @property
    def failed(self) -> bool:
        """Whether it exited with an error of its own, not by a signal, and not because it was asked to leave."""
        return (self.code or 0) > 0 and not self.evicted and not self.leaving and not self.suspended

    @property
    def suspended(self) -> bool:
        """Whether it ended because its job stops, to be resumed another time."""
        return self.code == SUSPENDED

    @property
    def signal(self) -> str:
        """The signal that ended it, as "SIGKILL"; "" if none did, or if it was asked to leave."""
        return signal.Signals(-self.process.returncode).name if (self.code or 0) < 0 and not self.leaving else ""

    @property
    def kill(self) -> str:
        """The signal that ended it and what sent that, as "SIGKILL, by fault injection"."""
        return f"{self.signal}, by {self.killed_by}" if self.killed_by else self.signal


class Line(NamedTuple):
    """One line that a child printed. It is a `result` if a user's program wrote it to stdout."""

    text: str
    result: bool


def signal_group(popen: subprocess.Popen[bytes], number: int) -> None:
    """Signal a child and its descendants: each child leads a process group."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(popen.pid, number)
