"""The batches of each round of a worker.

Training and `kvps verify` both use this module. The rows of a round follow from the job's settings, the worker's rank
and the number of the round (or of its unit), so any process can compute the same contribution again.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from kvps.config import JobConfig, division_of
from kvps.errors import InvalidSetting
from kvps.partitions import Rows, UnitBatches
from kvps.protocol.plan import Contribution
from kvps_workers.task import Task, blamed


def round_number(contribution: Contribution) -> int:
    """Return which of its worker's rounds a contribution was computed in; which unit, if the job has units."""
    return contribution.round - 1 if contribution.unit is None else contribution.unit


class Rounds:
    """The rounds of one worker, numbered from 0 over all epochs; of a job with units, the units.

    A round has a batch. Each epoch has each row once, in an order of its own. Raises InvalidSetting, and TaskFailed if
    a worker has no rows.

    total  how many rounds there are
    """

    def __init__(self, task: Task, config: JobConfig, rank: int, xp: ModuleType) -> None:
        if not config.batch_size:
            raise InvalidSetting(f"task {config.metadata.task!r} needs a batch_size from 1, and its job has 0")
        self._data = task.data(0, 1, xp) if config.units else task.data(rank, config.workers, xp)
        self._name, self._xp = config.metadata.task, xp
        division = division_of(size := len(self._data[0]), config)
        self.total = division.units
        self._batches = UnitBatches(size, config.batch_size, division, config.seed, None if config.units else rank)

    def rows(self, number: int) -> Rows:
        """Return the rows of a round."""
        return self._batches.rows(number)

    def samples(self, rows: Rows) -> tuple[Any, ...]:
        """Return these rows of each array of the data."""
        there = self._xp.asarray(rows)
        with blamed(self._name):  # the task's arrays may not allow taking rows
            return tuple(array[there] for array in self._data)
