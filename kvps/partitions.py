"""Which samples belong to which worker, and to which unit of data. Pure.

The schemes are SystemDS's four: DISJOINT_CONTIGUOUS, DISJOINT_ROUND_ROBIN, DISJOINT_RANDOM and OVERLAP_RESHUFFLE.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvps.errors import InvalidSetting, shown
from kvps.parsing import whole_setting

Rows = NDArray[np.int64]

SCHEMES = ("contiguous", "round-robin", "random", "overlap")
_MOST_SAMPLES = 2**63 - 1
# They keep these random numbers apart from each other, and from those of the batches.
_OF_ALL, _OF_WORKER, _OF_UNIT, _OF_LOADING = 1, 2, 3, 4


def partition(
    samples: int, workers: int, rank: int, *, scheme: str = "round-robin", seed: int = 0, epoch: int = 0
) -> Rows:
    """Return the rows of worker `rank` of `workers` in an epoch: int64, each from 0 to samples - 1.

    contiguous    a run of neighbouring rows
    round-robin   every `workers`-th row, beginning with row `rank`
    random        rows drawn anew in each epoch
    overlap       all rows, in an order that is drawn anew for each worker and epoch

    With the first three, each row belongs to exactly one worker, and the numbers of rows differ by one at most. The
    same arguments always give the same rows. Raises InvalidSetting.
    """
    samples = whole_setting("samples", samples, 0)
    if samples > _MOST_SAMPLES:
        raise InvalidSetting(f"samples must be at most {_MOST_SAMPLES}, not {samples}")
    workers = whole_setting("workers", workers, 1)
    rank = whole_setting("rank", rank, 0, workers - 1)
    seed, epoch = whole_setting("seed", seed, 0), whole_setting("epoch", epoch, 0)
    if scheme == "contiguous":
        return np.arange(samples * rank // workers, samples * (rank + 1) // workers)
    if scheme == "round-robin":
        return np.arange(rank, samples, workers)
    if scheme == "random":
        return np.random.default_rng((_OF_ALL, seed, epoch)).permutation(samples)[rank::workers]
    if scheme == "overlap":
        return np.random.default_rng((_OF_WORKER, seed, rank, epoch)).permutation(samples)
    raise InvalidSetting(f"scheme must be one of {', '.join(SCHEMES)}, not {shown(scheme)}")


def unit_seed(seed: int, unit: int, batch: int = 0) -> int:
    """Return the seed of all that is random in a unit of data, from 0 to 2**63 - 1, from the job's seed and the unit;
    where a unit has several batches, one of `batch`.

    It is NumPy's SeedSequence (O'Neill, "Developing a seed_seq Alternative", 2015), so neighbouring units have
    unrelated random numbers.
    """
    return _seed_of(_OF_UNIT, seed, unit, *([batch] if batch else []))


def _seed_of(*numbers: int) -> int:
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> np.uint64(1))


def epoch_order(samples: int, seed: int, epoch: int, rank: int | None = None) -> Rows:
    """Return the samples in the order of an epoch, drawn from the job's seed; with a static partition, in that of
    worker `rank`."""
    return np.random.default_rng((seed, epoch) if rank is None else (seed, rank, epoch)).permutation(samples)


class Division(NamedTuple):
    """Which batches belong to which unit of data, or to which round of a worker. All are numbered over all epochs.

    A unit has `per_unit` batches, and goes on from one epoch to the next; the last one of all may have fewer.

    batches  how many batches an epoch has
    """

    batches: int
    epochs: int
    per_unit: int

    @property
    def units(self) -> int:
        """How many units all epochs have."""
        return math.ceil(self.batches * self.epochs / self.per_unit)

    @property
    def units_per_epoch(self) -> int:
        """How many units an epoch has; 0 where they go on from one epoch to the next."""
        return self.batches if self.per_unit == 1 else 0

    def of(self, unit: int) -> range:
        """Return the numbers of the batches of a unit."""
        first = unit * self.per_unit
        return range(first, min(first + self.per_unit, self.batches * self.epochs))

    def unit(self, number: int) -> int:
        """Return the unit that a batch belongs to."""
        return number // self.per_unit


class UnitBatches:
    """The batches of a job that counts each of them once: each epoch has all samples, in an order drawn anew. Or those
    of the worker of one `rank`, which has samples of its own.

    Samples that fill no batch of the division are left out, in each epoch others.
    """

    def __init__(self, samples: int, batch_size: int, division: Division, seed: int, rank: int | None = None) -> None:
        self.division = division
        self._samples, self._batch_size, self._seed, self._rank = samples, batch_size, seed, rank
        self._order = lru_cache(2)(self._order_of)  # batches of the next epoch are loaded ahead

    def epoch(self, number: int) -> int:
        """Return the epoch of a batch, from 0."""
        return number // self.division.batches

    def place(self, number: int) -> tuple[int, int, int]:
        """Return the epoch of a batch, the first of its places in the order of that, and how many it has; the epoch may
        end before."""
        epoch, within = divmod(number, self.division.batches)
        return epoch, within * self._batch_size, self._batch_size

    def rows(self, number: int) -> Rows:
        """Return the samples of a batch."""
        epoch, first, count = self.place(number)
        return self._order(epoch)[first : first + count]

    def seed(self, number: int) -> int:
        """Return the seed of all that is random in training on a batch: that of its unit for the first batch of it."""
        unit = self.division.unit(number)
        return unit_seed(self._seed, unit, number - self.division.of(unit).start)

    def loading_seed(self, number: int) -> int:
        """Return the seed of all that is random in loading a batch, as augmentation."""
        return _seed_of(_OF_LOADING, self._seed, number)

    def _order_of(self, epoch: int) -> Rows:
        return epoch_order(self._samples, self._seed, epoch, self._rank)
