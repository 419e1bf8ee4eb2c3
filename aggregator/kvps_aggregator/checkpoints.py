"""Writes checkpoints of a running job, and moves its commit log into a file with each of them.

The holder of shard 0 writes them. No version is committed between two of its own steps, so it reads the state of
exactly the version that it has just seen committed, and pins that version. This costs the commit path one small MULTI.
A thread beside the commits then reads the bytes from Redis, as any reader does. If writing takes longer than the
commits in between, there are fewer checkpoints, and no commit waits.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from kvps.connection.sockets import ChunkGone
from kvps.errors import JobNotFound, KvpsError
from kvps.history import checkpoint_directory, commit_log
from kvps.history.checkpoint import Checkpoint
from kvps.history.log_stream import LogStream
from kvps.job import Job
from kvps.protocol.answers import ServerRestarted
from kvps.protocol.job_state import State

_log = logging.getLogger("kvps.checkpoint")


class Checkpoints(NamedTuple):
    """The settings of checkpoints: their directory, a checkpoint every how many versions, and how many are kept."""

    directory: Path
    every: int
    keep: int = 3


class Saver:
    """The writer of one job's checkpoints. `close` it."""

    def __init__(self, job: Job, settings: Checkpoints, flush: Callable[[], None]) -> None:
        """`flush` makes sure that Redis has everything that is committed."""
        self._flush = flush
        self._job = job
        self._settings = settings
        # Version, head, for a version may be lost and made again, and whether the job was finished.
        self._done = (-1, "", False)
        self._lock = threading.Lock()
        self._writing = self._behind = False
        self._pool = ThreadPoolExecutor(1, f"kvps-save-{job.name}")

    def committed(self, version: int) -> None:
        """Write this committed version if it is due; if the last checkpoint is not done, write a later version."""
        if version % self._settings.every:
            return
        with self._lock:
            self._behind = self._writing
            if self._writing:
                return
            self._writing = True
        self._pool.submit(self._save, self._held())

    def finish(self) -> None:
        """Write the last version of a finished job now, because its server may end with the job."""
        self._pool.submit(self._try, self._held()).result()

    def _held(self) -> State:
        return self._job.access.reader.held(1 + len(self._job.config.slots))

    def close(self) -> None:
        """Wait until the checkpoint that was begun is written."""
        self._pool.shutdown()

    def _save(self, state: State | None) -> None:
        while True:
            self._try(state)
            with self._lock:
                self._writing = self._behind
                if not self._behind:
                    return
                self._behind = False
            state = None

    def _try(self, state: State | None) -> None:
        try:
            self._write(state or self._held())
        except JobNotFound:
            return
        except KvpsError as error:  # training goes on, and the next checkpoint may succeed
            _log.warning("job %s: %s", self._job.name, error)
        except Exception:
            _log.exception("job %s: no checkpoint was written", self._job.name)

    def _write(self, state: State) -> None:
        job, directory = self._job, self._settings.directory
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
            kept = job.access.transport.safe_version(saved.version)
            commit_log.move(LogStream(job.access), job.access.scripts, directory, state, kept)
        checkpoint_directory.prune(directory, saved.job, saved.id, self._settings.keep)
        _log.info("job %s: wrote %s", job.name, directory / saved.filename)
