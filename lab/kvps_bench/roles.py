"""The processes of a measured job, and the job itself: an aggregator, and workers whose gradients are constants."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import kvps_aggregator
import numpy as np
from kvps_aggregator.checkpoints import KeptLog
from kvps_aggregator.nearness import Near

from kvps.arrays.layout import DTYPE
from kvps.errors import JobNotFound
from kvps.job import Job
from kvps.optim import SGD
from kvps.store import connect
from kvps_bench.crew import Place

LR = 2.0**-10  # a power of two: the weights after any number of rounds are exact, and can be checked


def model(nbytes: int) -> dict[str, Any]:
    """Return a model of zeros: one float32 array of `nbytes`."""
    return {"w": np.zeros(nbytes // DTYPE.itemsize, DTYPE)}


@contextmanager
def temporary_job(place: Place, over: str, params: Mapping[str, Any], **settings: Any) -> Iterator[Job]:
    """Yield a job under a fresh name, whose arrays go over "tcp", "unix" or "shm"; remove it after the block. It steps
    by SGD at the rate `LR` unless `settings` say otherwise."""
    settings = {"optimizer": SGD(lr=LR), "transport": "shm" if over == "shm" else "redis", **settings}
    job = place.store.create_job(f"bench-{secrets.token_hex(4)}", params, **settings)
    try:
        yield job
    finally:
        place.store.remove_job(job.name)


class Role:
    """The base of all roles: a process with a store."""

    def __init__(self, url: str) -> None:
        self.store = connect(url)

    def close(self) -> None:
        self.store.close()


class Aggregator(Role):
    """An aggregator that serves one job after another: all shards, or those of `shards`; those of the cluster's node at
    `near` first."""

    def __init__(self, url: str, job: str = "", shards: list[int] | None = None, near: str = "") -> None:
        super().__init__(url)
        self.serving: kvps_aggregator.Aggregator | None = None
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._shards = shards
        self._near = Near([near]) if near else None
        if job:
            self.serve(job)

    def serve(self, name: str) -> None:
        """Serve this job until `rest`."""
        self._stop.clear()
        options = kvps_aggregator.AggregatorOptions(near=self._near, log=KeptLog(versions=0))  # cases read it whole
        self.serving = kvps_aggregator.Aggregator(self._find(name), self._stop, self._shards, options)
        self._thread = threading.Thread(target=self.serving.run, kwargs={"until_finished": False})
        self._thread.start()

    def _find(self, name: str) -> Job:
        return self.store.job(name)

    def rest(self) -> None:
        """Stop serving."""
        self._stop.set()
        if self._thread:
            self._thread.join()

    def close(self) -> None:
        self.rest()
        super().close()


class Worker(Role):
    """A worker. Worker k's gradient is the constant k + 1, so the weights show whether every gradient was applied."""

    def __init__(self, url: str, job: str, rank: int, lent: bool = False) -> None:
        """With `lent` the gradient is computed into `session.buffers()`, as a part of the round."""
        super().__init__(url)
        opened = self.store.job(job)
        self._session = opened.join(f"w{rank}")
        self._lent = rank + 1 if lent else 0
        self._gradients = {p.name: np.full(p.shape, rank + 1, DTYPE) for p in opened.layout.parameters}

    def rounds(self, number: int) -> list[float]:
        """Pull, then return the seconds of each of `number` rounds."""
        self._session.pull()
        return self.more_rounds(number)

    def more_rounds(self, number: int) -> list[float]:
        """Return the seconds of each of `number` rounds, without the pull that must come before the first of all."""
        took = []
        for _ in range(number):
            began = time.perf_counter()
            self._session.push(self._computed() if self._lent else self._gradients)
            self._session.pull()
            took.append(time.perf_counter() - began)
        return took

    def _computed(self) -> dict[str, Any]:
        gradients = self._session.buffers()
        for array in gradients.values():
            array.fill(self._lent)
        return gradients

    def weights(self) -> tuple[int, float, float]:
        """Return the version, and the least and greatest of its weights."""
        params = self._session.pull().values()
        return self._session.version, min(float(a.min()) for a in params), max(float(a.max()) for a in params)

    def close(self) -> None:
        with suppress(JobNotFound):
            self._session.leave()
        super().close()
