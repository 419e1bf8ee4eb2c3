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

from kvps_workers.queue.worker_task import WorkerTask

_TICK_S = 1.0
_END_S = 10.0
_LAST = 500  # characters of its last line, which may be why it failed


@dataclass(frozen=True)
class HostResources:
    """What every task process of a host is given: its environment, the tasks that it may load besides the built-in
    ones, and the CUDA device that it computes on."""

    environment: Mapping[str, str]
    allowed: tuple[str, ...] = ()
    gpu: int | None = None
    acks: Path | None = None


class TaskProcess:
    """The process that works on one task.

    It is told what to do through its standard input, the server's URL too, and ends when that is closed, however this
    process ends. What it prints is passed on, each line with the task before it.
    """

    def __init__(self, task: WorkerTask, url: str, resources: HostResources) -> None:
        # -P: a redis.py or random.py in the user's directory must not hide the library of that name.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "kvps_workers.queue.task_process"],
            env=resources.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that Ctrl-C reaches it once, from here
        )
        self.last = ""  # what it said last
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
        """Wait for its end up to `timeout_s`; whether it came. One that was asked to leave long ago is killed."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
            self._reader.join(timeout_s)  # its own children may hold the pipe
            return True
        if self._asked and time.monotonic() - self._asked > _END_S:
            self._process.kill()
        return False

    def end(self) -> None:
        """Ask it to leave."""
        if not self._asked and self._process.poll() is None:
            self._asked = time.monotonic()
            self._process.terminate()

    def wait(self) -> int:
        """Wait for its end; its exit code, or the negative number of the signal that ended it."""
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
                print(f"{name}: {line}", file=sys.stderr, flush=True)
