"""The command line as tests run it: to its end, or beside the test."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import kvps
from kvps.server import private_server

KVPS = [sys.executable, "-m", "kvps"]
TINY = ["--epochs", "2", "--batch-size", "48"]
LONG = ["--epochs", "5000"]


def kvps_run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(
        [*KVPS, *arguments], capture_output=True, text=True, stdin=subprocess.DEVNULL, env=os.environ | environment
    )


def bench_run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a benchmark to its end."""
    return subprocess.run(
        [sys.executable, "-m", "kvps_bench", *arguments],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env=os.environ | environment,
    )


def private_store() -> kvps.Store:
    """Return a store on the user's private server, which must be running."""
    url = private_server.running()
    assert url
    return kvps.connect(url)


class Started:
    """A command that runs beside the test."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [*KVPS, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True
        )

    def until(self, words: str) -> str:
        """Return the command's output up to a line with these words."""
        assert self.process.stdout
        seen = ""
        for line in self.process.stdout:
            seen += line
            if words in line:
                return seen
        raise AssertionError(f"it ended without {words!r}: {seen}")

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send the command a signal; return its exit code."""
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        self.process.communicate(timeout=300)
        return self.process.returncode
