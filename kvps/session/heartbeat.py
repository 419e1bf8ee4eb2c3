"""A session's signs of life: from a thread of its own, and from the process's stand-in while no thread can run."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from itertools import count
from typing import NamedTuple

from kvps.connection.stand_in import Duty
from kvps.errors import JobNotFound, KvpsError, TooManyClients, WorkerEvicted
from kvps.protocol.answers import ServerRestarted
from kvps.session.iteration import IterationTimer
from kvps.transport.access import JobAccess

log = logging.getLogger("kvps.session")

_BEATS_PER_TIMEOUT = 5
_FIRST_SAMPLES, _BEATS_PER_SAMPLE = 8, 4  # of the server's clock
_SLOWEST_S = 1.0  # screens show within two seconds that a worker is silent


class Signs(NamedTuple):
    """How a sign of life is given that says what its giver does, and as which command the stand-in repeats it. To give
    one raises WorkerEvicted."""

    give: Callable[[str], None]
    command: Callable[[str], tuple[object, ...]]


def interval_s(worker_timeout_ms: int) -> float:
    """Return the seconds between two signs of life of a worker in a job with this timeout."""
    return min(worker_timeout_ms / 1000 / _BEATS_PER_TIMEOUT, _SLOWEST_S)


class Heartbeat(threading.Thread):
    """A thread that gives signs of life while a worker or an actor computes, because that may take longer than the
    timeout."""

    def __init__(self, access: JobAccess, name: str, signs: Signs, timer: IterationTimer | None = None) -> None:
        """`name` is the worker's or the actor's; `timer` says what a worker does."""
        super().__init__(name=f"kvps-heart-{name}", daemon=True)
        self._client = access.client
        self._worker = name
        self._signs = signs
        self._interval_s = interval_s(access.config.worker_timeout_ms)
        self._timer = timer
        self._stopped = threading.Event()
        self._duty = Duty(access.client, self._interval_s)
        self._duty.done([signs.command("")])  # the join was one
        self.evicted: WorkerEvicted | None = None

    def run(self) -> None:
        try:
            self._beat()
        finally:
            self._duty.end()

    def _beat(self) -> None:
        for beat in count():
            if self._stopped.wait(self._interval_s):
                return
            try:
                activity = self._timer.activity if self._timer else ""
                self._signs.give(activity)
                self._duty.done([self._signs.command(activity)])
                if self._timer and (beat < _FIRST_SAMPLES or not beat % _BEATS_PER_SAMPLE):
                    self._timer.clock.sample()
            except WorkerEvicted as error:
                self.evicted = error
                return
            except JobNotFound:
                return  # an id is used once: this job does not come back
            except TooManyClients as error:  # the worker itself may have a connection
                log.warning("worker %s cannot say that it lives: %s", self._worker, error)
            except (KvpsError, ServerRestarted):
                if self._client.closed:
                    return
                continue  # the worker's own next call raises it too, with the context that a user needs

    def stop(self) -> None:
        self._stopped.set()
        self._duty.end()
