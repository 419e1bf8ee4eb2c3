"""A session's signs of life: from a thread of its own, and from the process's stand-in while no thread can run."""

from __future__ import annotations

import logging
import threading
from itertools import count

from kvps.connection.stand_in import Duty
from kvps.errors import JobNotFound, KvpsError, TooManyClients, WorkerEvicted
from kvps.protocol.answers import ServerRestarted
from kvps.session.iteration import IterationTimer
from kvps.transport.access import JobAccess

log = logging.getLogger("kvps.session")

_BEATS_PER_TIMEOUT = 5
_FIRST_SAMPLES, _BEATS_PER_SAMPLE = 8, 4  # of the server's clock
_SLOWEST_S = 1.0  # screens show within two seconds that a worker is silent


def interval_s(worker_timeout_ms: int) -> float:
    """Return the seconds between two signs of life of a worker in a job with this timeout."""
    return min(worker_timeout_ms / 1000 / _BEATS_PER_TIMEOUT, _SLOWEST_S)


class Heartbeat(threading.Thread):
    """A thread that gives signs of life while the worker computes, because a round may take longer than the timeout."""

    def __init__(self, access: JobAccess, worker: str, incarnation: str, timer: IterationTimer) -> None:
        super().__init__(name=f"kvps-heart-{worker}", daemon=True)
        self._scripts = access.scripts
        self._client = access.client
        self._worker = worker
        self._incarnation = incarnation
        self._interval_s = interval_s(access.config.worker_timeout_ms)
        self._timer = timer
        self._stopped = threading.Event()
        self._duty = Duty(access.client, self._interval_s)
        self._duty.done([self._sign_of_life("")])  # the join was one
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
                activity = self._timer.activity
                self._scripts.heartbeat(self._worker, self._incarnation, activity)
                self._duty.done([self._sign_of_life(activity)])
                if beat < _FIRST_SAMPLES or not beat % _BEATS_PER_SAMPLE:
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

    def _sign_of_life(self, activity: str) -> tuple[object, ...]:
        return self._scripts.sign_of_life(self._worker, self._incarnation, activity)

    def stop(self) -> None:
        self._stopped.set()
        self._duty.end()
