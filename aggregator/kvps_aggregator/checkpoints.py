"""Writes checkpoints of a running job, and keeps its commit log in Redis short.

The holder of shard 0 does both. No version is committed between two of its own steps, so it reads the state of exactly
the version that it has just seen committed, and pins that version. This costs the commit path one small MULTI. A thread
beside the commits then reads the bytes from Redis, as any reader does. If writing takes longer than the commits in
between, there are fewer checkpoints, and no commit waits.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from kvps.config import JobConfig
from kvps.connection.sockets import ChunkGone
from kvps.errors import JobNotFound, KvpsError
from kvps.history import checkpoint_directory, commit_log
from kvps.history.checkpoint import Checkpoint
from kvps.history.log_stream import LogStream
from kvps.job import Job
from kvps.protocol.answers import ServerRestarted
from kvps.protocol.job_state import State

_log = logging.getLogger("kvps.checkpoint")

_CONTRIBUTIONS = 100_000  # each takes about 70 bytes, and a version 400
_LEAST = 200
_AT_ONCE = 5_000  # versions that are trimmed in one call of the script, so that it never blocks the server for long


class Checkpoints(NamedTuple):
    """The settings of checkpoints: their directory, a checkpoint every how many versions, and how many are kept."""

    directory: Path
    every: int
    keep: int = 3


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


class HistoryWriter:
    """The writer of one job's checkpoints, if the user wants any, and the one that cuts its log. `close` it."""

    def __init__(self, job: Job, checkpoints: Checkpoints | None, kept: KeptLog, flush: Callable[[], None]) -> None:
        """`flush` makes sure that Redis has everything that is committed."""
        self._flush = flush
        self._job = job
        self._checkpoints = checkpoints
        # Version, head, for a version may be lost and made again, and whether the job was finished.
        self._done = (-1, "", False)
        self._lock = threading.Lock()
        self._writing = self._behind = False
        self._directory = kept.directory
        self._versions = kept.versions_of(job.config)
        self._next_cut = self._versions + self._versions // 10  # the version with which the log may be too long
        self._pool = ThreadPoolExecutor(1, f"kvps-history-{job.name}")

    def committed(self, version: int) -> None:
        """Write this committed version if a checkpoint is due; if the last one is not done, write a later version. Cut
        the log if that is due."""
        if self._checkpoints and not version % self._checkpoints.every:  # first: its version is kept for some seconds
            self._begin()
        if self._versions and version > self._next_cut:
            self._next_cut = version + self._versions // 10
            self._pool.submit(self._try, self._cut, "its commit log was not cut")

    def _begin(self) -> None:
        with self._lock:
            self._behind = self._writing
            if self._writing:
                return
            self._writing = True
        self._pool.submit(self._save, self._held())

    def finish(self) -> None:
        """Write the last version of a finished job now, because its server may end with the job."""
        if self._checkpoints:
            self._pool.submit(self._write, self._held()).result()

    def _held(self) -> State:
        return self._job.access.reader.held(1 + len(self._job.config.slots))

    @property
    def writing(self) -> bool:
        """Whether a checkpoint is being written, which reads bytes that may have died since."""
        with self._lock:
            return self._writing

    def close(self) -> None:
        """Wait until what was begun is done."""
        self._pool.shutdown()

    def _save(self, state: State | None) -> None:
        while True:
            self._write(state)
            with self._lock:
                self._writing = self._behind
                if not self._behind:
                    return
                self._behind = False
            state = None

    def _write(self, state: State | None) -> None:
        if self._checkpoints:
            self._try(partial(self._keep, self._checkpoints, state))

    def _try(self, write: Callable[[], None], otherwise: str = "") -> None:
        try:
            write()
        except (JobNotFound, ServerRestarted):  # the next commit in the new history does it
            return
        except KvpsError as error:  # training goes on, and the next try may succeed
            _log.warning("job %s: %s", self._job.name, f"{otherwise}: {error}" if otherwise else error)
        except Exception:
            _log.exception("job %s: %s", self._job.name, otherwise or "no checkpoint was written")

    def _keep(self, settings: Checkpoints, state: State | None) -> None:
        job, directory, state = self._job, settings.directory, state or self._held()
        if (state.version, state.head, state.finished(job.config)) == self._done:
            return
        try:
            saved = Checkpoint.of(job.access, state)
        except ChunkGone:  # another reader's pin was in the way: write a later version
            saved = job.checkpoint()
        saved.write(directory / saved.filename)
        self._done = (saved.version, saved.head, saved.finished)
        with suppress(KvpsError, ServerRestarted):  # on failure, less of the log moves: what may be lost stays in Redis
            self._flush()
        with suppress(ServerRestarted):  # then the next checkpoint moves the log
            self._move(directory, state, job.access.transport.safe_version(saved.version))
        checkpoint_directory.prune(directory, saved.job, saved.id, settings.keep)
        _log.info("job %s: wrote %s", job.name, directory / saved.filename)

    def _cut(self) -> None:
        state = self._job.state()
        first = max(state.moved, state.begin.version)
        last = self._job.access.transport.safe_version(state.version - self._versions)
        while first < last:
            first = min(first + _AT_ONCE, last)
            self._move(self._directory, state, first)

    def _move(self, directory: Path | None, state: State, version: int) -> None:
        commit_log.move(LogStream(self._job.access), self._job.access.scripts, directory, state, version)
