"""The batches of each round of a worker.

Training and `kvps verify` both use this module. The rows of a round follow from the job's settings, the worker's rank
and the number of the round (or of its unit), so any process can compute the same contribution again.
"""

from __future__ import annotations

import math
from functools import lru_cache
from types import ModuleType
from typing import Any

from kvps.config import JobConfig
from kvps.errors import InvalidSetting
from kvps.partitions import Rows, epoch_order
from kvps.protocol.plan import Contribution
from kvps_workers.task import Task, blamed


def round_number(contribution: Contribution) -> int:
    """Return which of its worker's rounds a contribution was computed in; which unit, if the job has units."""
    return contribution.round - 1 if contribution.unit is None else contribution.unit


class Rounds:
    """The rounds of one worker, numbered from 0 over all epochs; of a job with units, the units.

    A round has a batch. Each epoch has each row once, in an order of its own. Raises InvalidSetting, and TaskFailed if
    a worker has no rows.

    total              how many rounds there are
    batches_per_epoch  how many batches an epoch has
    """

    def __init__(self, task: Task, config: JobConfig, rank: int, xp: ModuleType) -> None:
        if not config.batch_size:
            raise InvalidSetting(f"task {config.metadata.task!r} needs a batch_size from 1, and its job has 0")
        self._data = task.data(0, 1, xp) if config.units else task.data(rank, config.workers, xp)
        self._config, self._rank, self._xp = config, rank, xp
        self._order = lru_cache(1)(self._order_of)
        self._size = len(self._data[0])
        self.batches_per_epoch = math.ceil(self._size / config.batch_size)
        self.total = self.batches_per_epoch * config.epochs

    def rows(self, number: int) -> Rows:
        """Return the rows of a round."""
        epoch, batch = divmod(number, self.batches_per_epoch)
        size = self._config.batch_size
        return self._order(epoch)[batch * size : (batch + 1) * size]

    def samples(self, rows: Rows) -> tuple[Any, ...]:
        """Return these rows of each array of the data."""
        there = self._xp.asarray(rows)
        with blamed(self._config.metadata.task):  # the task's arrays may not allow taking rows
            return tuple(array[there] for array in self._data)

    def _order_of(self, epoch: int) -> Rows:
        """Return the rows of the data in the order of an epoch."""
        return epoch_order(self._size, self._config.seed, epoch, None if self._config.units else self._rank)
