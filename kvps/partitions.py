"""Static partitions: which samples belong to which worker. Pure.

The schemes are SystemDS's four: DISJOINT_CONTIGUOUS, DISJOINT_ROUND_ROBIN, DISJOINT_RANDOM and OVERLAP_RESHUFFLE.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvps.errors import InvalidSetting, shown

Rows = NDArray[np.int64]

SCHEMES = ("contiguous", "round-robin", "random", "overlap")
_MOST_SAMPLES = 2**63 - 1
_OF_ALL, _OF_WORKER, _OF_UNIT = (
    1,
    2,
    3,
)  # they keep these random numbers apart from each other, and from those of the batches


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


def unit_seed(seed: int, unit: int) -> int:
    """Return the seed of all that is random in a unit of data, from 0 to 2**63 - 1, from the job's seed and the unit.

    It is NumPy's SeedSequence (O'Neill, "Developing a seed_seq Alternative", 2015), so neighbouring units have
    unrelated random numbers.
    """
    return int(np.random.SeedSequence((_OF_UNIT, seed, unit)).generate_state(1, np.uint64)[0] >> np.uint64(1))
