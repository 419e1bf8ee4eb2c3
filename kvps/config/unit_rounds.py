"""Which units of data make a round, where each version is made of one round of units.

An epoch begins with a whole round, and its last round may be shorter. Rounds and units count from 0: version v + 1 is
made of the units of round v. `include/unit_rounds.lua` has the same arithmetic.
"""

from __future__ import annotations

import math
from typing import NamedTuple


class UnitRounds(NamedTuple):
    """Rounds of `per_round` units, where each epoch has `per_epoch` of the `total` units."""

    per_round: int
    per_epoch: int
    total: int

    @property
    def rounds(self) -> int:
        """How many rounds all units make."""
        return self.round_of(self.total - 1) + 1

    def round_of(self, unit: int) -> int:
        """Return the round of a unit."""
        epoch, within = divmod(unit, self.per_epoch)
        return epoch * math.ceil(self.per_epoch / self.per_round) + within // self.per_round

    def units_of(self, round_: int) -> range:
        """Return the units of a round; none behind the last one."""
        epoch, within = divmod(round_, math.ceil(self.per_epoch / self.per_round))
        first = epoch * self.per_epoch + within * self.per_round
        return range(min(first, self.total), min(first + self.per_round, (epoch + 1) * self.per_epoch, self.total))
