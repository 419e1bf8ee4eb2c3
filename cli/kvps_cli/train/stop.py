"""Ctrl-C, SIGTERM and SIGHUP to `kvps run`: the copies end after the same round, a checkpoint is written, and the run
may be resumed. A second one ends everything at once.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Sequence
from types import FrameType

from kvps.history import commit_log
from kvps.history.checkpoint_directory import prune
from kvps.history.log_stream import LogStream
from kvps.job import Job
from kvps.protocol.job_state import State
from kvps_cli.long_work import LongWork
from kvps_cli.output import leave_lost_terminal, surviving_its_reader
from kvps_cli.supervise import Supervisor
from kvps_cli.train.kept_files import KeptFiles

log = logging.getLogger("kvps.supervise")

_WORDS: dict[int, str] = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "SIGHUP"}
_QUIET_S = 2.0  # after the end of all copies, the aggregator commits what it can commit in less


class Stop:
    """Hears Ctrl-C, SIGTERM and SIGHUP inside the block, where `possible`; then has the copies of a job end.

    asked  whether one of them came
    """

    def __init__(self, possible: bool) -> None:
        self.asked = False
        self._possible = possible
        self._word = ""
        self._told = set[str]()  # ids of jobs
        self._before: dict[int, signal._HANDLER] = {}
        self._quiet_since: dict[str, tuple[int, float]] = {}  # job id -> the version, and since when it is the newest

    def __enter__(self) -> Stop:
        if self._possible:
            heard = [number for number in _WORDS if signal.getsignal(number) != signal.SIG_IGN]  # as nohup has SIGHUP
            self._before = {number: signal.signal(number, self._hear) for number in heard}
        return self

    def __exit__(self, *_: object) -> None:
        if not self.asked:
            self._give_back()

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.asked, self._word = True, _WORDS[number]
        self._give_back()  # a second one ends everything at once
        leave_lost_terminal()

    def _give_back(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def tell(self, supervisor: Supervisor, jobs: Sequence[Job]) -> None:
        """Tell the copies to end, if a signal came: once for each job, also one that is made meanwhile."""
        if not self.asked:
            return
        began = not self._told
        for job in jobs:
            if job.id not in self._told:
                self._told.add(job.id)
                job.suspend(f"kvps run was sent {self._word}")
        if began:
            supervisor.stop()
            with surviving_its_reader(True):
                log.info(
                    "%s: waits until all copies have done the same round; a second one ends them at once", self._word
                )

    def over(self, state: State) -> bool:
        """Return whether nothing more is committed, once all copies have ended. What others have pushed for the round
        of a copy that was killed is not: they do that round again."""
        if state.settled:
            return True
        if not self._told and state.run.state != "suspended":  # by another host, or by kvps suspend
            return False
        version, since = self._quiet_since.get(state.id, (-1, 0.0))
        if version != state.version:
            self._quiet_since[state.id] = state.version, (since := time.monotonic())
        return time.monotonic() - since > _QUIET_S


def keep(job: Job, kept: KeptFiles, quiet: bool) -> None:
    """Write a checkpoint of the newest version, and the log up to it, where a run keeps its files. Raises KvpsError."""
    directory = kept.kept_log.directory
    if directory is None:
        return
    state = job.state()
    with LongWork(quiet) as work, work.stage(f"writing version {state.version}"):
        checkpoint = job.checkpoint()
        checkpoint.write(directory / checkpoint.filename)
        commit_log.keep(LogStream(job.access), directory, state, checkpoint.version)
        if kept.saving:
            prune(directory, checkpoint.job, checkpoint.id, kept.saving.keep)
