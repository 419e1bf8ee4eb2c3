"""How many units of data a number of samples makes, where a script or a task counts each batch once."""

from __future__ import annotations

import math

from kvps.config.settings import UncheckedConfig
from kvps.errors import InvalidSetting
from kvps.partitions import Division

UNITS_PER_ROUND = 4
"""The units of a round where neither the user nor a task says how many."""


def division_of(samples: int, s: UncheckedConfig) -> Division:
    """Return which batches of so many samples belong to which unit: those of one push. Local steps go on from one
    epoch to the next."""
    return Division(math.ceil(samples / s.batch_size), s.epochs, s.batches_per_round)


def derive_units(s: UncheckedConfig) -> None:
    """Set what follows from `samples` and was not given. Raises InvalidSetting for units that do not fit them, and
    where they cannot be divided."""
    if not s.batch_size or not s.epochs:
        raise InvalidSetting(
            "samples are divided into batches that count once each: set batch_size and epochs too, or leave it out"
        )
    division = division_of(s.samples, s)
    units, per_epoch = division.units, division.units_per_epoch
    if s.units not in (0, units) or s.units_per_epoch not in (0, per_epoch):
        raise InvalidSetting(
            f"samples={s.samples} are {units} units in {s.epochs} epochs of batches of {s.batch_size}, not {s.units}: "
            f"leave units and units_per_epoch out"
        )
    derived = {"units": units, "units_per_epoch": per_epoch, "units_per_round": s.units_per_round or UNITS_PER_ROUND}
    for name, value in derived.items():
        object.__setattr__(s, name, value)  # as in a dataclass that is frozen
