"""Writes the rows of a job to its loggers while the job trains. A logger that fails ends, and the training goes on."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from kvps.errors import KvpsError
from kvps.job import Job
from kvps_monitor.loggers.logger import Logger
from kvps_monitor.loggers.rows import Row, RowReader
from kvps_monitor.loggers.targets import Target

log = logging.getLogger("kvps.training_log")

_LOOK_S = 0.5


class TrainingLog:
    """The loggers of one job. Inside its `with` block a thread of its own writes each row when it is ready.

    What is ready at the block's end is written then. With `holds_newest` the last row waits for `tested`.
    """

    def __init__(
        self, job: Job, targets: Sequence[Target], checkpoints: Path | None = None, holds_newest: bool = False
    ) -> None:
        """Open all loggers; `places` has a line for each that chose its place, `failures` one for each that has
        failed. Raises InvalidSetting, CorruptData."""
        self.places: list[str] = []
        self.failures: list[str] = []
        self._job = job
        self._loggers: dict[str, Logger] = {}
        self._tests: dict[int, Mapping[str, float]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name=f"kvps-log-{job.name}", daemon=True)
        try:
            for target in targets:
                self._loggers[str(target)], place = target.open(job)
                self.places += [place] if place else []
        except BaseException:
            self._close()
            raise
        first = min((logger.last for logger in self._loggers.values()), default=0)
        self._rows = RowReader(job, first, holds_newest, checkpoints)
        self._said = 0

    @property
    def over(self) -> bool:
        """Whether the job is finished. Raises JobNotFound, CorruptData."""
        return self._job.state().finished(self._job.config)

    @property
    def ended(self) -> bool:
        """Whether all loggers have failed, or there is none."""
        return not self._loggers

    def tested(self, version: int, figures: Mapping[str, float]) -> None:
        """Add what the task says of the weights of a version whose row is not written yet."""
        self._tests[version] = figures

    def write(self) -> None:
        """Write the rows that are ready."""
        if self.ended:
            return
        try:
            rows = self._rows.read()
        except Exception as error:  # whatever is wrong with the log of a job, its training goes on
            for name in list(self._loggers):
                self._end(name, error)
            return
        for first, missing in self._rows.missing[self._said :]:
            log.warning("versions %d to %d are no longer in Redis: the log has no rows of them", first, missing)
        self._said = len(self._rows.missing)
        rows = [self._with_test(row) for row in rows]
        for name, logger in list(self._loggers.items()):
            try:
                logger.write(rows)
            except KvpsError as error:
                self._end(name, error)

    def _with_test(self, row: Row) -> Row:
        figures = {} if row.is_evaluation else self._tests.pop(row.version, {})
        return replace(row, values={**row.values, **{f"test/{name}": value for name, value in figures.items()}})

    def _end(self, name: str, error: Exception) -> None:
        """End one logger after an error."""
        logger = self._loggers.pop(name)
        why = str(error) if isinstance(error, KvpsError) else f"{type(error).__name__}: {error}"
        self.failures.append(f"the log {name} ends after version {logger.last}: {why}")
        log.error("%s; the training goes on", self.failures[-1])  # an error: it must be seen with --quiet too
        with suppress(KvpsError):
            logger.close()

    def _follow(self) -> None:
        while not self._stop.wait(_LOOK_S) and not self.ended:
            self.write()

    def _close(self) -> None:
        for name, logger in list(self._loggers.items()):
            try:
                logger.close()
            except KvpsError as error:
                self._end(name, error)

    def __enter__(self) -> TrainingLog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        # A row that is not ready now, of a job that goes on, is written by whoever logs it then: it has its loss.
        self._rows.holds_newest = False
        self.write()
        self._close()
