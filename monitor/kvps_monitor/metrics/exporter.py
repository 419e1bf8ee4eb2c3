"""Reads all jobs of a server about twice a second, on a thread. A scrape gets what the last reading found."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvps.errors import JobNotFound, KvpsError, NoServer, ServerLost
from kvps.job import readable
from kvps.store import Store
from kvps_monitor.metrics.job_reader import JobReader

READ_EVERY_S = 0.5
"""Traces are capped. Their shortest, 50 entries, holds the rounds of 0.5 s as long as a worker does 100 in a second."""
_PATIENCE_S = 2.0
_SILENT_S = 5.0
_FIRST_S = 8.0  # Prometheus gives a scrape 10 s
_MOST_REST_S = 60.0


@dataclass
class _Aside:
    """A job that could not be read: why, and when it is tried again (time.monotonic)."""

    why: str
    rest_s: float
    until: float


class Exporter:
    """The readings of one server. `lock` is held while a job's totals change.

    readers     name -> the job, once it was read
    reading_s   how long the last reading took, in seconds
    memory      bytes that the server uses and may use
    unreadable  how many jobs cannot be read
    """

    def __init__(self, store: Store, job: str | None, log: Callable[[str], None]) -> None:
        """Read all jobs, or only `job`. `log` is called with one line when a job or the server cannot be read."""
        self.readers: dict[str, JobReader] = {}
        self.lock = threading.Lock()
        self.reading_s = 0.0
        self.memory = (0, 0)
        self._store = Store(store.client.twin(_PATIENCE_S))
        self._only = job
        self._log = log
        self._aside: dict[str, _Aside] = {}
        self._trouble = ""  # why the server cannot be read; "" if it can
        self._heard_at = 0.0
        self._stopped, self._first = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvps-metrics", daemon=True)

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread, and close its connections."""
        self._stopped.set()
        if self._thread.ident:
            self._thread.join()
        self._store.close()

    @property
    def up(self) -> bool:
        """Whether Redis answers. The first call waits until all jobs were read once, for some seconds at most."""
        self._first.wait(_FIRST_S)
        return not self._trouble and self._first.is_set() and time.monotonic() - self._heard_at < _SILENT_S

    @property
    def unreadable(self) -> int:
        return len(self._aside)

    def _heard(self) -> None:
        self._heard_at = time.monotonic()

    def _run(self) -> None:
        while not self._stopped.is_set():
            began = time.monotonic()
            try:
                self._read()
            except KvpsError as error:
                self._say_trouble(error)
            else:
                self._trouble = ""
                self.reading_s = time.monotonic() - began
            self._first.set()
            self._stopped.wait(READ_EVERY_S)

    def _say_trouble(self, error: KvpsError) -> None:
        """Say why the server cannot be read, once for each time that it stops to answer."""
        if not self._trouble:
            self._log(f"metrics: {error}")
        self._trouble = str(error)

    def _read(self) -> None:
        """Read all jobs. Raises ServerLost, NoServer, ServerError."""
        listed = set(self._store.jobs())
        if self._only is not None:
            listed &= {self._only}
        self.memory = self._store.client.memory()
        self._heard()
        with self.lock:
            self.readers = {name: reader for name, reader in self.readers.items() if name in listed}
        self._aside = {name: aside for name, aside in self._aside.items() if name in listed}
        for name in sorted(listed):
            aside = self._aside.get(name)
            if not self._stopped.is_set() and (aside is None or aside.until < time.monotonic()):
                self._read_job(name)
                self._heard()

    def _read_job(self, name: str) -> None:
        """Read one job. If that fails, its series end until it can be read, and it is then counted anew. Raises
        ServerLost, NoServer."""
        try:
            with readable(name):
                reader = self.readers.get(name) or JobReader(self._store.job(name), self.lock)
                reader.read(self._heard)
        except JobNotFound:
            self._forget(name)  # removed; a job that was made anew under its name is read the next time
            self._aside.pop(name, None)
        except (NoServer, ServerLost):
            raise
        except Exception as error:  # whatever is wrong with one job, the others are served
            self._forget(name)
            self._lay_aside(name, str(error) if isinstance(error, KvpsError) else f"{type(error).__name__}: {error}")
        else:
            self._aside.pop(name, None)
            with self.lock:
                self.readers[name] = reader

    def _forget(self, name: str) -> None:
        with self.lock:
            self.readers = {other: reader for other, reader in self.readers.items() if other != name}

    def _lay_aside(self, name: str, why: str) -> None:
        """Try a job again later, and say each reason once."""
        before = self._aside.get(name)
        if before is None or before.why != why:
            self._log(f"metrics: passed over: {why}")
        rest_s = min(_MOST_REST_S, 2 * before.rest_s if before else READ_EVERY_S)
        self._aside[name] = _Aside(why, rest_s, time.monotonic() + rest_s)
