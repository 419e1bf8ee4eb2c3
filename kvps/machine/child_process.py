"""A child process whose end may be waited for by a thread that a signal interrupts."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from typing import Any


class ChildProcess(subprocess.Popen[bytes]):
    """`subprocess.Popen` with a thread that waits for the process's end.

    Popen itself asks whether the process has ended under a lock that it takes before its `try`. An interrupt between
    the two, as Ctrl-C raises it, leaves the lock taken, and the next wait never returns. Here no one who waits or looks
    takes that lock. Only the process that started the child may wait for it, and no fork of that one.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self._runs = threading.Lock()  # taken until the process has ended
        self._runs.acquire()
        super().__init__(*arguments, **named)
        try:
            threading.Thread(target=self._await_end, name=f"kvps-child-{self.pid}", daemon=True).start()
        except RuntimeError as error:
            self._runs.release()
            self.kill()
            super().wait()
            raise OSError(errno.EAGAIN, str(error)) from None

    def _await_end(self) -> None:
        super().wait()
        self._runs.release()

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code, as Popen. Raises subprocess.TimeoutExpired after `timeout` seconds."""
        if sys.is_finalizing() and self.returncode is None:  # no other thread runs any more
            try:
                self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            except ChildProcessError:  # that thread has reaped it, and cannot say how it ended
                self.returncode = 0  # as Popen says
        if self.returncode is None:
            if not self._runs.acquire(timeout=-1 if timeout is None else max(0.0, timeout)):
                assert timeout is not None
                raise subprocess.TimeoutExpired(self.args, timeout)
            self._runs.release()  # for another that waits; the exit code is known, whether or not this is reached
        return self.returncode

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""
        return self.returncode
