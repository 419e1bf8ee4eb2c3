"""The batches of each round of a worker.

Training and `kvps verify` both use this module. The rows of a round follow from the job's settings, the worker's rank
and the number of the round (or of its unit), so any process can compute the same contribution again.
"""

from __future__ import annotations

import math
from functools import lru_cache
from types import ModuleType
from typing import Any

import numpy as np

from kvps.config import OWN_PARTITION, JobConfig
from kvps.errors import InvalidSetting, TaskFailed
from kvps.partitions import Rows, partition
from kvps.protocol.plan import Contribution
from kvps_workers.task import Task, blamed


def rounds_of(samples: int, config: JobConfig) -> int:
    """Return how many rounds all epochs over so many samples take."""
    return config.epochs * _rounds_of_epoch(samples, config)


def _rounds_of_epoch(samples: int, config: JobConfig) -> int:
    batches = math.ceil(samples / config.batch_size)
    return math.ceil(batches / (config.batches_per_round or batches))


def round_number(contribution: Contribution) -> int:
    """Return which of its worker's rounds a contribution was computed in; which unit, if the job has units."""
    return contribution.round - 1 if contribution.unit is None else contribution.unit


class Rounds:
    """The rounds of one worker, counted from 0 over all epochs; of a job with units, the units.

    Each epoch has each of the worker's rows once, in an order of its own. A round has `config.batches_per_round`
    batches, the last one of an epoch may have fewer. Raises TaskFailed if a worker gets no rows.
    """

    def __init__(self, task: Task, config: JobConfig, rank: int, xp: ModuleType) -> None:
        whole = config.units or config.partition != OWN_PARTITION
        self._data = task.data(0, 1, xp) if whole else task.data(rank, config.workers, xp)
        if not config.batch_size:
            raise InvalidSetting(f"task {config.task!r} needs a batch_size from 1, and its job has 0")
        self._config, self._rank, self._xp = config, rank, xp
        self.procs = config.procs
        self._samples = len(self._data[0])
        self._order = lru_cache(1)(self._order_of)
        samples = len(self._own(0))
        if not samples:
            raise TaskFailed(
                f"task {config.task!r} has {self._samples} samples, and {config.workers} workers need one each: take "
                f"fewer workers"
            )
        self.per_epoch = _rounds_of_epoch(samples, config)
        self.total = rounds_of(samples, config)

    def batches(self, number: int) -> list[Rows]:
        """Return the rows of each batch of a round."""
        epoch, number = divmod(number, self.per_epoch)
        order, size = self._order(epoch), self._config.batch_size
        rows = size * (self._config.batches_per_round or len(order))
        end = min(len(order), rows * (number + 1))
        return [order[start : min(start + size, end)] for start in range(rows * number, end, size)]

    def samples(self, rows: Rows) -> tuple[Any, ...]:
        """Return these rows of each array of the data."""
        there = self._xp.asarray(rows)
        with blamed(self._config.task):  # the task's arrays may not allow taking rows
            return tuple(array[there] for array in self._data)

    def _own(self, epoch: int) -> Rows:
        """Return the worker's rows of the data in an epoch."""
        config = self._config
        if config.units or config.partition == OWN_PARTITION:
            return np.arange(self._samples)
        return partition(
            self._samples, config.workers, self._rank, scheme=config.partition, seed=config.seed, epoch=epoch
        )

    def _order_of(self, epoch: int) -> Rows:
        """Return the worker's rows in the order of an epoch."""
        own = self._own(epoch)
        seed = (self._config.seed,) if self._config.units else (self._config.seed, self._rank)
        return own[np.random.default_rng((*seed, epoch)).permutation(len(own))]
