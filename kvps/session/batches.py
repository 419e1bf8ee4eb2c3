"""Batches of data that count exactly once, whoever computes them: each is the unit that a session was handed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np

from kvps.config import JobConfig, division_of
from kvps.errors import InvalidSetting, WrongOrder, shown
from kvps.partitions import UnitBatches
from kvps.session.session import Session

MOST_REPEATS = 50
"""How often a batch comes again that was not pushed, as for a gradient that was not finite."""
_CREATE = "create it with samples=len(dataset), batch_size and epochs"


def batches(
    session: Session, *arrays: Any, batch_size: int | None = None, epochs: int | None = None, seed: bool = True
) -> Iterator[tuple[Any, ...]]:
    """Yield the weights, and the rows of each of the `arrays` of the next batch that this worker is to push.

    with job.join() as session:
        for params, x, y in kvps.batches(session, images, labels):
            session.push(gradient(params, x, y))

    The job was created with `samples`, the length of each array, `batch_size` and `epochs`; given here, they must be
    the same. Each epoch has all samples in an order drawn anew, from the job's seed. The loop ends for all workers at
    once, when all batches are pushed. With `seed`, random and NumPy's global random numbers begin with
    `Session.unit_seed` for each batch, whoever computes it. A batch that was not pushed comes again.

    Raises InvalidSetting for what does not fit the job, WrongOrder for a batch that came 50 times without a push, and
    what `next_unit` and `pull` raise.
    """
    lengths = {len(array) for array in arrays}
    if len(lengths) != 1:
        raise InvalidSetting(f"kvps.batches takes arrays of one length, not {sorted(lengths)}")
    if session.config.takes_local_steps:
        raise InvalidSetting("kvps.batches is for gradients, and this job takes local_steps: see kvps.torch")
    plan = plan_of(session.config, lengths.pop(), batch_size, epochs)
    return _batches(session, arrays, plan, seed)


def _batches(session: Session, arrays: tuple[Any, ...], plan: UnitBatches, seed: bool) -> Iterator[tuple[Any, ...]]:
    last, repeats = -1, 0
    while (unit := session.next_unit()) is not None:
        repeats = repeats + 1 if unit == last else 0
        check_repeats(unit, repeats)
        last = unit
        params, rows = session.pull(), plan.rows(unit)
        if seed:
            seed_numpy(plan.seed(unit))
        yield params, *(array[rows] for array in arrays)


def plan_of(
    config: JobConfig, samples: int, batch_size: int | None, epochs: int | None, drop_last: bool = False
) -> UnitBatches:
    """Return which batches the units of a job have. Raises InvalidSetting if they are not of so many samples, or if the
    job's versions are not made of rounds of units."""
    if not config.samples:
        raise InvalidSetting(f"this job does not hand out the batches of a data set: {_CREATE}")
    if not config.unit_rounds:
        raise InvalidSetting(
            "batches come in rounds, which a job with staleness -1 has not: choose 0 or more, or take next_unit()"
        )
    given = {"batch_size": batch_size, "epochs": epochs}
    for name, value in given.items():
        if value not in (None, wanted := getattr(config, name)):
            raise InvalidSetting(f"{name} is {shown(value)} here and {wanted} in the job: leave it out here")
    used = samples // config.batch_size * config.batch_size if drop_last else samples
    if used != config.samples:
        what = f", of which drop_last leaves {used}" if drop_last else ""
        raise InvalidSetting(
            f"the data set has {samples} samples{what}, and the job was created with samples={config.samples}: give "
            f"it the data that the job was created for"
        )
    return UnitBatches(samples, config.batch_size, division_of(config.samples, config), config.seed)


def check_repeats(unit: int, repeats: int) -> None:
    """Raise WrongOrder for a unit that came again and again, and was never pushed."""
    if repeats >= MOST_REPEATS:
        raise WrongOrder(
            f"unit {unit} came {repeats} times and was never pushed: a batch comes again until it counts, so push a "
            f"gradient of zeros for one that is to be left out"
        )


def seed_numpy(seed: int) -> None:
    """Begin the random numbers of `random` and of NumPy's global generator with a seed from 0 to 2**63 - 1."""
    random.seed(seed)
    np.random.seed([seed >> 32, seed & 0xFFFFFFFF])
