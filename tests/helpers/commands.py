"""The command line as tests run it: to its end, or beside the test."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

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


def kvps_forked(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command that starts nothing to its end, as `kvps_run` does, but without the time of its imports."""
    return _forked("kvps_cli", arguments, environment)


def _forked(module: str, arguments: Sequence[str], environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    forker = _command_forker(module)
    assert forker.stdin
    assert forker.stdout
    forker.stdin.write(json.dumps([arguments, {**os.environ, **environment}, os.getcwd()]) + "\n")
    forker.stdin.flush()
    return subprocess.CompletedProcess(arguments, *json.loads(forker.stdout.readline()))


@cache
def _command_forker(module: str) -> subprocess.Popen[str]:
    """Return the process that forks the commands; it ends with this process, which has the other end of its stdin."""
    command = [sys.executable, str(Path(__file__).with_name("command_forker.py")), module]
    of_no_test = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=of_no_test)


def bench_run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a benchmark to its end."""
    return subprocess.run(
        [sys.executable, "-m", "kvps_bench", *arguments],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env=os.environ | environment,
    )


def bench_forked(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a benchmark that starts nothing to its end, as `bench_run` does, but without the time of its imports."""
    return _forked("kvps_bench.cli", arguments, environment)


def private_store() -> kvps.Store:
    """Return a store on the user's private server, which must be running."""
    url = private_server.running()
    assert url
    return kvps.connect(url)


class Started:
    """A command that runs beside the test."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            env=environment,
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
