"""How many units of data a number of samples makes, where a script or a task counts each batch once."""

from __future__ import annotations

import math

from kvps.config.settings import UncheckedConfig
from kvps.errors import InvalidSetting

UNITS_PER_ROUND = 4
"""The units of a round where neither the user nor a task says how many."""


def units_of(s: UncheckedConfig) -> tuple[int, int]:
    """Return how many units all epochs over `samples` have, and one of them; 0 where all are one.

    A unit has the batches of one push, and the last unit of an epoch may have fewer. Local steps go on from one epoch
    to the next, so only the last unit of all may have fewer there. Raises InvalidSetting.
    """
    if not s.batch_size or not s.epochs:
        raise InvalidSetting(
            "samples are divided into batches that count once each: set batch_size and epochs too, or leave it out"
        )
    if s.timed_rounds:
        raise InvalidSetting(
            "samples are divided into units of a fixed number of batches, and with local_steps auto a round has not: "
            "leave one of the two out"
        )
    batches = math.ceil(s.samples / s.batch_size)
    if s.takes_local_steps:
        return math.ceil(batches * s.epochs / s.batches_per_round), 0
    per_epoch = math.ceil(batches / (s.batches_per_round or batches))
    return per_epoch * s.epochs, per_epoch


def derive_units(s: UncheckedConfig) -> None:
    """Set what follows from `samples` and was not given. Raises InvalidSetting for units that do not fit them."""
    units, per_epoch = units_of(s)
    if s.units not in (0, units) or s.units_per_epoch not in (0, per_epoch):
        raise InvalidSetting(
            f"samples={s.samples} are {units} units in {s.epochs} epochs of batches of {s.batch_size}, not {s.units}: "
            f"leave units and units_per_epoch out"
        )
    derived = {"units": units, "units_per_epoch": per_epoch, "units_per_round": s.units_per_round or UNITS_PER_ROUND}
    for name, value in derived.items():
        object.__setattr__(s, name, value)  # as in a dataclass that is frozen
