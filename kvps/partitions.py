"""Which samples belong to which worker, and to which unit of data. Pure.

The schemes are SystemDS's four: DISJOINT_CONTIGUOUS, DISJOINT_ROUND_ROBIN, DISJOINT_RANDOM and OVERLAP_RESHUFFLE.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from kvps.errors import InvalidSetting, shown

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
    samples = _whole("samples", samples, 0)
    if samples > _MOST_SAMPLES:
        raise InvalidSetting(f"samples must be at most {_MOST_SAMPLES}, not {samples}")
    workers = _whole("workers", workers, 1)
    rank = _whole("rank", rank, 0, workers - 1)
    seed, epoch = _whole("seed", seed, 0), _whole("epoch", epoch, 0)
    if scheme == "contiguous":
        return np.arange(samples * rank // workers, samples * (rank + 1) // workers)
    if scheme == "round-robin":
        return np.arange(rank, samples, workers)
    if scheme == "random":
        return np.random.default_rng((_OF_ALL, seed, epoch)).permutation(samples)[rank::workers]
    if scheme == "overlap":
        return np.random.default_rng((_OF_WORKER, seed, rank, epoch)).permutation(samples)
    raise InvalidSetting(f"scheme must be one of {', '.join(SCHEMES)}, not {shown(scheme)}")


def _whole(name: str, value: object, low: int, high: int | None = None) -> int:
    """Return a whole number from `low` to `high` as Python's, which does not overflow. Raises InvalidSetting."""
    number = int(value) if isinstance(value, int | np.integer) and not isinstance(value, bool) else low - 1
    if number < low or (high is not None and number > high):
        upto = "" if high is None else f" to {high}"
        raise InvalidSetting(f"{name} must be a whole number from {low}{upto}, not {value!r}")
    return number


def unit_seed(seed: int, unit: int, batch: int = 0) -> int:
    """Return the seed of all that is random in a unit of data, from 0 to 2**63 - 1, from the job's seed and the unit;
    where a unit has several batches, one of `batch`.

    It is NumPy's SeedSequence (O'Neill, "Developing a seed_seq Alternative", 2015), so neighbouring units have
    unrelated random numbers.
    """
    return _seed_of(_OF_UNIT, seed, unit, *([batch] if batch else []))


def _seed_of(*numbers: int) -> int:
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> np.uint64(1))


class UnitBatches:
    """The batches of a job that counts each of them once: each epoch has all samples, in an order drawn anew.

    Batches are numbered over all epochs, and unit n has the `per_unit` batches from n * per_unit on. The order follows
    from the job's seed and the epoch; `kvps_workers.rounds` draws the same one for a task.

    With `drop_last`, the samples of an epoch that fill no batch are left out, in each epoch others.

    units      how many units all epochs have
    per_epoch  how many batches an epoch has, of which the last may be smaller
    """

    def __init__(
        self, samples: int, batch_size: int, epochs: int, seed: int, per_unit: int = 1, drop_last: bool = False
    ) -> None:
        self.per_epoch = samples // batch_size if drop_last else math.ceil(samples / batch_size)
        self._samples, self._batch_size = samples, batch_size
        self._total = self.per_epoch * epochs
        self.units = math.ceil(self._total / per_unit)
        self._seed, self._per_unit = seed, per_unit
        self._order = lru_cache(2)(self._order_of)  # batches of the next epoch are loaded ahead

    def of(self, unit: int) -> range:
        """Return the numbers of the batches of a unit; none behind the last one."""
        first = unit * self._per_unit
        return range(min(first, self._total), min(first + self._per_unit, self._total))

    def unit(self, number: int) -> int:
        """Return the unit that a batch belongs to."""
        return number // self._per_unit

    def rows(self, number: int) -> Rows:
        """Return the samples of a batch."""
        epoch, within = divmod(number, self.per_epoch)
        return self._order(epoch)[within * self._batch_size : (within + 1) * self._batch_size]

    def seed(self, number: int) -> int:
        """Return the seed of all that is random in training on a batch: that of its unit for the first batch of it."""
        return unit_seed(self._seed, *divmod(number, self._per_unit))

    def loading_seed(self, number: int) -> int:
        """Return the seed of all that is random in loading a batch, as augmentation."""
        return _seed_of(_OF_LOADING, self._seed, number)

    def _order_of(self, epoch: int) -> Rows:
        return np.random.default_rng((self._seed, epoch)).permutation(self._samples)
