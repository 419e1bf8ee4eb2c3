"""A process that holds many sessions of one job, each on its own thread."""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvps.arrays.layout import DTYPE
from kvps.connection.urls import redacted
from kvps.errors import JobNotFound
from kvps.job import Job
from kvps_bench.roles import Role

_STACK_BYTES = 512 << 10


class Joined(NamedTuple):
    """How many sessions of one process have joined, when the first began to join, and when the last had joined."""

    number: int
    began: float
    ended: float


class Left(NamedTuple):
    """How many sessions of one process still run, how many contributions were acknowledged, and the first error."""

    remaining: int
    acknowledged: int
    error: str


class Sessions(Role):
    """One process with many sessions, each on its own thread."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        threading.stack_size(_STACK_BYTES)
        self._threads: list[threading.Thread] = []
        self._over = threading.Event()

    def join(self, name: str, workers: Sequence[str | None], limit_s: float) -> Joined:
        """Start a session for each worker (None is any free id). Return when all have joined, one failed, or after
        `limit_s`."""
        self._over.clear()
        self._errors: list[str] = []
        self._acknowledged: list[int] = []
        self._joined: list[float] = []
        self._one_more = threading.Semaphore(0)
        job = self.store.job(name)
        self._threads = [threading.Thread(target=self._work, args=(job, w), daemon=True) for w in workers]
        began = time.monotonic()
        for thread in self._threads:
            thread.start()
        for _ in self._threads:
            if self._errors or not self._one_more.acquire(timeout=max(0, began + limit_s - time.monotonic())):
                break
        return Joined(len(self._joined), began, max(self._joined, default=began))

    def _work(self, job: Job, worker: str | None) -> None:
        try:
            session = job.join(worker)
            self._joined.append(time.monotonic())
            self._one_more.release()
            with session:
                gradient = {p.name: np.ones(p.shape, DTYPE) for p in job.layout.parameters}
                while not self._over.is_set():
                    session.pull()
                    if not self._over.is_set():
                        session.push(gradient)
            self._acknowledged.append(session.clock)
        except JobNotFound:
            self._one_more.release()  # the job was removed because another session failed
        except Exception as error:  # any error is reported
            reason = str(error).replace(redacted(self.store.url), "the server")
            self._errors.append(f"{type(error).__name__}: {reason}")
            self._one_more.release()

    def leave(self, limit_s: float) -> Left:
        """Make all sessions leave; return when all have left, or after `limit_s`."""
        self._over.set()
        deadline = time.monotonic() + limit_s
        for thread in self._threads:
            thread.join(max(0, deadline - time.monotonic()))
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        return Left(len(self._threads), sum(self._acknowledged), next(iter(self._errors), ""))
