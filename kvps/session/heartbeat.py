"""A session's signs of life, on a thread of their own."""

from __future__ import annotations

import logging
import threading
from itertools import count

from kvps.errors import JobNotFound, KvpsError, TooManyClients, WorkerEvicted
from kvps.protocol.answers import ServerRestarted
from kvps.protocol.scripts import JobScripts
from kvps.session.iteration import IterationTimer

log = logging.getLogger("kvps.session")

_BEATS_PER_TIMEOUT = 5
_FIRST_SAMPLES, _BEATS_PER_SAMPLE = 8, 4  # of the server's clock
_SLOWEST_S = 1.0  # screens show within two seconds that a worker is silent


def interval_s(worker_timeout_ms: int) -> float:
    """Return the seconds between two signs of life of a worker in a job with this timeout."""
    return min(worker_timeout_ms / 1000 / _BEATS_PER_TIMEOUT, _SLOWEST_S)


class Heartbeat(threading.Thread):
    """A thread that gives signs of life while the worker computes, because a round may take longer than the timeout."""

    def __init__(
        self, scripts: JobScripts, worker: str, incarnation: str, interval_s: float, timer: IterationTimer
    ) -> None:
        super().__init__(name=f"kvps-heart-{worker}", daemon=True)
        self._scripts = scripts
        self._worker = worker
        self._incarnation = incarnation
        self._interval_s = interval_s
        self._timer = timer
        self._stopped = threading.Event()
        self.evicted: WorkerEvicted | None = None

    def run(self) -> None:
        for beat in count():
            if self._stopped.wait(self._interval_s):
                return
            try:
                self._scripts.heartbeat(self._worker, self._incarnation, self._timer.activity)
                if self._timer.clock and (beat < _FIRST_SAMPLES or not beat % _BEATS_PER_SAMPLE):
                    self._timer.clock.sample()
            except WorkerEvicted as error:
                self.evicted = error
                return
            except JobNotFound:
                return  # an id is used once: this job does not come back
            except TooManyClients as error:  # the worker itself may have a connection
                log.warning("worker %s cannot say that it lives: %s", self._worker, error)
            except (KvpsError, ServerRestarted):
                continue  # the worker's own next call raises it too, with the context that a user needs

    def stop(self) -> None:
        self._stopped.set()
