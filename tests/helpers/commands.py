"""The command line as tests run it: to its end, or beside the test. Its processes come from a zygote."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from helpers.zygote import Popen

import kvps
from kvps.server import private_server

KVPS = [sys.executable, "-m", "kvps"]
TINY = ["--epochs", "2", "--batch-size", "48"]
ENDLESS = """\
import kvps, numpy as np
with kvps.from_env() as worker:
    job = worker.create_job({'x': np.zeros(3, np.float32)})
    with job.join() as session:
        while True:
            session.push(dict(session.pull()))
"""
"""A script that trains until somebody ends it."""
LONG = ["--epochs", "5000"]
LONG_UP = [*LONG, "--slow", "w0=30x"]  # its rounds leave processors to what the test does meanwhile


def run(
    command: Sequence[Any], check: bool = False, popen: type[Popen] = Popen, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, as `subprocess.run` does; its output is text."""
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with popen(command, **(streams | options)) as process:
        done = subprocess.CompletedProcess(command, 0, *process.communicate(timeout=300))
    done.returncode = process.returncode
    if check:
        done.check_returncode()
    return done


def kvps_run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command of kvps to its end."""
    return run([*KVPS, *arguments], env=os.environ | environment)


def refused(*arguments: str, code: int = 2, **environment: str) -> str:
    """Run a command of kvps that ends with this exit code, prints nothing, and says why in one line; return the line
    without "kvps: error: "."""
    done = kvps_run(*arguments, **environment)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (code, "", 1), done.stderr
    assert done.stderr.startswith("kvps: error: ")
    return done.stderr.removeprefix("kvps: error: ").rstrip("\n")


def bench_run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a benchmark to its end."""
    return run([sys.executable, "-m", "kvps_bench", *arguments], env=os.environ | environment)


def private_store() -> kvps.Store:
    """Return a store on the user's private server, which must be running."""
    url = private_server.running()
    assert url
    return kvps.connect(url)


class Started:
    """A command that runs beside the test."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str] | None = None, popen: type[Popen] = Popen
    ) -> None:
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        self.process = popen(command, **streams, text=True, env=environment)

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

    def clear_away(self) -> None:
        """End the command, if it has not ended, and print the rest of what it said, if nobody has read that."""
        ended = self.process.poll()
        if ended is None:
            self.process.terminate()
            self.process.send_signal(signal.SIGCONT)  # a test may have stopped it
        if self.process.stdout and not self.process.stdout.closed:
            output, _ = self.process.communicate(timeout=300)
            had = "was ended" if ended is None else f"had ended with {ended}"
            print(f"{shlex.join(map(str, self.process.args))} {had}: {output}")

    def wait(self) -> int:
        """Wait for the command's end; return its exit code."""
        self.process.communicate(timeout=300)
        return self.process.returncode

    def output(self, code: int = 0) -> str:
        """Return what the command prints until its end. Raises AssertionError if its exit code is another."""
        output, _ = self.process.communicate(timeout=300)
        assert self.process.returncode == code, output
        return output
