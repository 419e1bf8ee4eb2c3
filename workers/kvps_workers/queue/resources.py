"""Starts horses: the processes that work on training tasks, see `kvps_workers.queue.task_process`."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvps_workers.training import WorkerTask

_TICK_S = 1.0
_END_S = 10.0
_LAST = 500  # characters of its last line, which may be why it failed


@dataclass(frozen=True)
class HostResources:
    """What every horse of this host has: which tasks it may load besides the built-in ones, and where it computes."""

    environment: Mapping[str, str]
    allowed: tuple[str, ...] = ()
    gpu: int | None = None
    acks: Path | None = None


class Horse:
    """The process that works on one task. It is told what to do through its standard input, URL and all, and ends when
    that is closed, however this process ends. What it says is passed on, with the task before it."""

    def __init__(self, task: WorkerTask, url: str, means: HostResources) -> None:
        told: dict[str, Any] = {
            "url": url,
            "job": task.job,
            "id": task.id,
            "worker": task.worker,
            "slow": task.slow,
            "prefetch": task.prefetch,
            "allowed": means.allowed,
            "gpu": means.gpu,
            "acks": str(means.acks) if means.acks else None,
        }
        # -P, for a redis.py or random.py that lies in the user's directory is not meant.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "kvps_workers.queue.task_process"],
            env=means.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that Ctrl-C comes to it once, from here
        )
        self.last = ""
        self._asked = 0.0
        self._reader = threading.Thread(target=self._read, args=(str(task),), daemon=True)
        self._reader.start()
        assert self._process.stdin
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(told).encode() + b"\n")
            self._process.stdin.flush()

    @property
    def code(self) -> int:
        return self._process.wait()

    def ended(self, timeout_s: float) -> bool:
        """Wait for its end, not longer than `timeout_s`; whether it came. Who was asked to leave long ago is killed."""
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

    def wait(self) -> None:
        while not self.ended(_TICK_S):
            pass
        assert self._process.stdin
        with suppress(BrokenPipeError):
            self._process.stdin.close()

    def _read(self, name: str) -> None:
        assert self._process.stdout
        with self._process.stdout as said:
            for raw in said:
                line = raw.decode(errors="replace").rstrip()
                self.last = line.removeprefix("kvps: error: ")[:_LAST]
                print(f"{name}: {line}", file=sys.stderr, flush=True)
