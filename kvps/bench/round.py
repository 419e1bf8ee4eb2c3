"""`kvps bench round`: one BSP round of everybody, against bare sockets that carry the same bytes to the same server.

A round: every worker pushes a gradient, the aggregator averages and steps, every worker has the new weights.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import kvps_aggregator
import numpy as np

from kvps.bench.bare import Socket
from kvps.bench.crew import Member, Place, crew, spawning, together
from kvps.bench.turns import Case, Times, in_turns
from kvps.layout import DTYPE
from kvps.optim import SGD, Optimizer
from kvps.store import connect

_JOB = "bench-round"
_LR = 2.0**-10


def sizes(nbytes: int, tensors: int) -> list[int]:
    """Items of each of `tensors` float32 arrays that take `nbytes` in all; unequal, as in a convolutional network."""
    items = nbytes // DTYPE.itemsize
    weights = np.geomspace(1, 1000, tensors) if tensors > 1 else np.ones(1)
    out = [max(1, int(items * w / weights.sum())) for w in weights]
    out[-1] += items - sum(out)
    return out


def model(nbytes: int, tensors: int) -> dict[str, Any]:
    """Zeros under as many names."""
    return {f"t{i}": np.zeros(size, DTYPE) for i, size in enumerate(sizes(nbytes, tensors))}


class Aggregator:
    """A process that serves the job until it is closed."""

    def __init__(self, url: str, job: str) -> None:
        self._store = connect(url)
        self._stop = threading.Event()
        arguments = {"stop": self._stop, "until_finished": False}
        self._thread = threading.Thread(target=kvps_aggregator.serve, args=(self._store.job(job),), kwargs=arguments)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._store.close()


class Worker:
    """A worker's process. Worker k's gradient is the constant k + 1: the weights tell whether all was applied."""

    def __init__(self, url: str, job: str, rank: int) -> None:
        self._store = connect(url)
        job_ = self._store.job(job)
        self._session = job_.join(f"w{rank}")
        self._gradients = {p.name: np.full(p.shape, rank + 1, DTYPE) for p in job_.layout.parameters}
        self._first = job_.layout.parameters[0].name

    def rounds(self, number: int) -> list[float]:
        """Seconds of each of so many rounds."""
        took = []
        self._session.pull()
        for _ in range(number):
            began = time.perf_counter()
            self._session.push(self._gradients)
            self._session.pull()
            took.append(time.perf_counter() - began)
        return took

    def weights(self) -> tuple[int, float, float]:
        """The version, and the least and greatest of its weights."""
        params = self._session.pull()
        return self._session.version, min(float(a.min()) for a in params.values()), float(params[self._first].max())

    def close(self) -> None:
        self._session.leave()
        self._store.close()


class BareWorker:
    """SETs its gradient, GETs the weights."""

    def __init__(self, url: str, nbytes: int, rank: int, barrier: Any) -> None:
        self._socket, self._rank, self._barrier = Socket(url), rank, barrier
        self._gradient = np.full(nbytes // DTYPE.itemsize, rank + 1, DTYPE)
        self._weights = np.zeros_like(self._gradient)

    def rounds(self, number: int) -> list[float]:
        """Seconds of each of so many rounds."""
        took = []
        self._barrier.wait()
        for _ in range(number):
            began = time.perf_counter()
            self._socket.set(f"bare:g{self._rank}", self._gradient)
            self._barrier.wait()
            self._barrier.wait()
            self._socket.get("bare:w", self._weights)
            took.append(time.perf_counter() - began)
        return took

    def clear(self) -> None:
        """Delete what it has stored."""
        self._socket.delete(f"bare:g{self._rank}", self._gradient)


class BareAggregator:
    """GETs every gradient, SETs the weights."""

    def __init__(self, url: str, nbytes: int, workers: int, barrier: Any) -> None:
        self._socket, self._workers, self._barrier = Socket(url), workers, barrier
        self._array = np.zeros(nbytes // DTYPE.itemsize, DTYPE)

    def rounds(self, number: int) -> list[float]:
        """Serve so many rounds."""
        self._barrier.wait()
        for _ in range(number):
            self._barrier.wait()
            for rank in range(self._workers):
                self._socket.get(f"bare:g{rank}", self._array)
            self._socket.set("bare:w", self._array)
            self._barrier.wait()
        return []

    def clear(self) -> None:
        """Delete what it has stored."""
        self._socket.delete("bare:w", self._array)


def bare_case(members: list[Member], rounds: int) -> Case:
    """Bare rounds of a crew whose last member is the aggregator; the seconds of its first."""

    def case() -> Sequence[float]:
        return together(members, "rounds", rounds)[0]  # type: ignore[no-any-return]

    return case


@contextmanager
def bare(url: str, nbytes: int, workers: int, rounds: int) -> Iterator[Case]:
    """Bare rounds."""
    barrier = spawning.Barrier(workers + 1)
    makers = [(BareWorker, url, nbytes, rank, barrier) for rank in range(workers)]
    with crew(*makers, (BareAggregator, url, nbytes, workers, barrier)) as members:
        yield bare_case(members, rounds)
        together(members, "clear")


@contextmanager
def kvps(
    place: Place,
    url: str,
    nbytes: int,
    workers: int,
    rounds: int,
    tensors: int = 1,
    optimizer: Optimizer | None = None,
    **settings: Any,
) -> Iterator[Case]:
    """Rounds of a job, whose weights are looked at in the end: what was measured did the work."""
    optimizer = optimizer or SGD(lr=_LR)
    job = place.store.create_job(_JOB, model(nbytes, tensors), workers=workers, optimizer=optimizer, **settings)
    makers = [(Worker, url, job.name, rank) for rank in range(workers)]
    try:
        with crew((Aggregator, url, job.name), *makers) as (_, *members):

            def case() -> Sequence[float]:
                return together(members, "rounds", rounds)[0]  # type: ignore[no-any-return]

            yield case
            if isinstance(optimizer, SGD):
                expected = -_LR * (workers + 1) / 2
                for version, least, greatest in together(members, "weights"):
                    assert least == greatest == np.float32(version * expected), (version, least, greatest)
    finally:
        place.store.remove_job(job.name)


def measure(place: Place, transport: str, nbytes: int, workers: int, turns: int, rounds: int) -> dict[str, Times]:
    """A round of kvps and of bare sockets, in turns."""
    url = place.urls[transport]
    with bare(url, nbytes, workers, rounds) as plain, kvps(place, url, nbytes, workers, rounds) as whole:
        return in_turns({"bare": plain, "kvps": whole}, turns)
