"""The processes of a scenario: workers, aggregators and proxies, forked on demand, so that thousands can be killed."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from helpers.zygote import Popen

from kvps.machine import process


class _Forked(Popen):
    modules = ("chaos.roles",)


class Death(NamedTuple):
    """The end of a process: by `signal`, or by itself with `code`."""

    pid: int
    signal: int
    code: int


class Processes:
    """The running processes. What they print goes to the file `log`. They end with the block."""

    def __init__(self, log: Path) -> None:
        self.log = log
        log.touch()
        self._running: dict[
            int, tuple[Popen, int]
        ] = {}  # pid: the process, and a fd that can be read when it has ended

    def fork(self, spec: dict[str, Any]) -> tuple[int, str]:
        """Fork a process that does what `spec` says; return its pid and its `process.mark`."""
        command = [sys.executable, "-c", "from chaos import roles; roles.main()", json.dumps(spec)]
        with self.log.open("ab") as out:
            forked = _Forked(command, stdin=subprocess.PIPE, stdout=out, stderr=out, start_new_session=True)
        assert forked.stdin
        self._running[forked.pid] = forked, os.pidfd_open(forked.pid)
        with forked.stdin:  # it waits for the end of its input: a process that has ended has no mark
            return forked.pid, process.mark(forked.pid)

    def kill(self, pid: int, number: int = signal.SIGKILL) -> bool:
        """Send a process a signal; return False if it had ended before."""
        if pid not in self._running or self._running[pid][0].poll() is not None:
            return False
        self._running[pid][0].send_signal(number)
        return True

    def deaths(self, timeout_s: float) -> list[Death]:
        """Return the processes that have ended since the last call; wait up to `timeout_s` for the first."""
        poll = select.poll()
        pids = {fd: pid for pid, (_, fd) in self._running.items()}
        for fd in pids:
            poll.register(fd, select.POLLIN)
        return [self._forgotten(pids[fd]) for fd, _ in poll.poll(timeout_s * 1000)]

    def _forgotten(self, pid: int) -> Death:
        ended, fd = self._running.pop(pid)
        os.close(fd)
        code = ended.wait()
        return Death(pid, max(0, -code), max(0, code))

    def __enter__(self) -> Processes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pid in list(self._running):
            self.kill(pid)
            self._forgotten(pid)
