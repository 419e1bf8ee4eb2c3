"""Starts task processes, and watches over them: see `task_process` for what they do."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from kvps.errors import coloured
from kvps.machine.child_process import ChildProcess
from kvps_workers.queue.worker_task import WorkerTask

_TICK_S = 1.0
_END_S = 10.0
_LAST = 500  # characters kept of the process's last line, which may say why it failed


@dataclass(frozen=True)
class HostResources:
    """The means of a host's task processes: environment, tasks allowed besides the built-in ones, CUDA device."""

    environment: Mapping[str, str]
    allowed: tuple[str, ...] = ()
    gpu: int | None = None
    acks: Path | None = None


class TaskProcess:
    """The process that works on one task.

    It gets the task and the server's URL through its standard input, and ends when that is closed, however this process
    ends. Each line that it prints is passed on, with the task before it.
    """

    def __init__(self, task: WorkerTask, url: str, resources: HostResources) -> None:
        # -P: a redis.py or random.py in the user's directory must not hide the library of that name.
        self._process = ChildProcess(
            [sys.executable, "-P", "-m", "kvps_workers.queue.task_process"],
            env=resources.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that Ctrl-C reaches it only once, through this process
        )
        self.last = ""  # its last line
        self._asked = 0.0  # when it was asked to leave
        self._reader = threading.Thread(target=self._read, args=(str(task),), daemon=True)
        self._reader.start()
        acks = str(resources.acks) if resources.acks else None
        order = {"task": asdict(task), "url": url, "allowed": resources.allowed, "gpu": resources.gpu, "acks": acks}
        assert self._process.stdin
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()

    def ended(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` for its end, and return whether it came. Kill it if it was asked to leave long ago."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
            self._reader.join(timeout_s)  # its own children may hold the pipe
            return True
        if self._asked and time.monotonic() - self._asked > _END_S:
            self._process.kill()
        return False

    def end(self) -> None:
        """Ask the process to leave."""
        if not self._asked and self._process.poll() is None:
            self._asked = time.monotonic()
            self._process.terminate()

    def wait(self) -> int:
        """Wait for its end. Return its exit code, or the negative number of the signal that ended it."""
        while not self.ended(_TICK_S):
            pass
        assert self._process.stdin
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        return self._process.wait()

    def _read(self, name: str) -> None:
        assert self._process.stdout
        with self._process.stdout as output:
            for raw in output:
                line = raw.decode(errors="replace").rstrip()
                self.last = line.removeprefix("kvps: error: ")[:_LAST]
                print(coloured(f"{name}: {line}"), file=sys.stderr, flush=True)
