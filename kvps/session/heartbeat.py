"""A session's signs of life, on a thread of their own."""

from __future__ import annotations

import logging
import threading

from kvps.errors import KvpsError, TooManyClients, WorkerEvicted
from kvps.protocol.scripts import JobScripts, ServerRestarted

log = logging.getLogger("kvps.session")

_BEATS_PER_TIMEOUT = 5


class Heartbeat(threading.Thread):
    """A thread that gives signs of life while the worker computes, because a round may take longer than the timeout."""

    def __init__(self, scripts: JobScripts, worker: str, incarnation: str, timeout_s: float) -> None:
        super().__init__(name=f"kvps-heart-{worker}", daemon=True)
        self._scripts = scripts
        self._worker = worker
        self._incarnation = incarnation
        self._interval_s = timeout_s / _BEATS_PER_TIMEOUT
        self._stopped = threading.Event()
        self.evicted: WorkerEvicted | None = None

    def run(self) -> None:
        while not self._stopped.wait(self._interval_s):
            try:
                self._scripts.heartbeat(self._worker, self._incarnation)
            except WorkerEvicted as error:
                self.evicted = error
                return
            except TooManyClients as error:  # the worker itself may have a connection
                log.warning("worker %s cannot say that it lives: %s", self._worker, error)
            except (KvpsError, ServerRestarted):
                continue  # the worker's own next call raises it too, with the context that a user needs

    def stop(self) -> None:
        self._stopped.set()
