"""Keeps a job's commit log in Redis short: older entries are moved into a file, or deleted where there is none.

The holder of shard 0 does so, on a thread beside the commits.
"""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from kvps.config import JobConfig
from kvps.errors import JobNotFound, KvpsError
from kvps.history import commit_log
from kvps.history.log_stream import LogStream
from kvps.job import Job
from kvps.protocol.answers import ServerRestarted

_log = logging.getLogger("kvps.checkpoint")

_CONTRIBUTIONS = 100_000  # each takes about 70 bytes, and a version 400
_LEAST = 200
_AT_ONCE = 5_000  # versions that are trimmed in one call of the script, so that it never blocks the server for long


class KeptLog(NamedTuple):
    """The settings of a job's commit log in Redis.

    versions   the log is cut to so many of the newest versions when it has a tenth more; 0 keeps all, and None as many
               as have 100,000 contributions in BSP, but 200 at the least
    directory  where the file is into which older entries are moved; without one they are deleted
    """

    versions: int | None = None
    directory: Path | None = None

    def versions_of(self, config: JobConfig) -> int:
        """Return how many versions stay of a job with these settings; 0 is all."""
        return max(_LEAST, _CONTRIBUTIONS // config.workers) if self.versions is None else self.versions


AS_USUAL = KeptLog()
"""The settings of an aggregator that was given none."""


class LogKeeper:
    """The keeper of one job's log. `close` it."""

    def __init__(self, job: Job, settings: KeptLog) -> None:
        self._job = job
        self._directory = settings.directory
        self._versions = settings.versions_of(job.config)
        self._next = self._versions + self._versions // 10  # the version with which the log may be too long
        self._pool = ThreadPoolExecutor(1, f"kvps-log-{job.name}")

    def committed(self, version: int) -> None:
        """Cut the log, if that is due with this committed version."""
        if self._versions and version > self._next:
            self._next = version + self._versions // 10
            self._pool.submit(self._cut)

    def close(self) -> None:
        """Wait until what was begun is done."""
        self._pool.shutdown()

    def _cut(self) -> None:
        job = self._job
        try:
            state = job.state()
            first, last = (
                max(state.moved, state.begin.version),
                job.access.transport.safe_version(state.version - self._versions),
            )
            while first < last:
                first = min(first + _AT_ONCE, last)
                commit_log.move(LogStream(job.access), job.access.scripts, self._directory, state, first)
        except (JobNotFound, ServerRestarted):  # the next commit in the new history cuts it
            return
        except KvpsError as error:  # training goes on, and the next cut may succeed
            _log.warning("job %s: its commit log was not cut: %s", job.name, error)
        except Exception:
            _log.exception("job %s: its commit log was not cut", job.name)
