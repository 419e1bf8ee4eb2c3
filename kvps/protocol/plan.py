"""The open plan of a job, as `plan.lua` wrote it: which contributions, in which order, make the next version. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import NamedTuple


class Contribution(NamedTuple):
    """One worker's gradient for one round, as inbox, open plan and log name it; `unit` is the unit of data it used."""

    worker: str
    incarnation: str
    seq: int
    round: int
    base: int
    weight: int
    digest: str
    unit: int | None = None

    @classmethod
    def from_text(cls, text: str) -> Contribution:
        """Parse "worker incarnation seq round base weight unit digest", as `push.lua` writes it. Raises ValueError."""
        worker, incarnation, seq, round_, base, weight, unit, digest = text.split(" ")
        unit_ = None if unit == "-" else int(unit)
        return cls(worker, incarnation, int(seq), int(round_), int(base), int(weight), digest, unit_)

    @property
    def text(self) -> str:
        """The text that `from_text` parses."""
        unit = "-" if self.unit is None else self.unit
        said = (self.worker, self.incarnation, self.seq, self.round, self.base, self.weight, unit, self.digest)
        return " ".join(map(str, said))

    @property
    def digests(self) -> list[str]:
        """The digest of each shard's part."""
        return self.digest.split(",")


@dataclass(frozen=True)
class Plan:
    """The contributions that make the next version. `progress` is the sum of the vector clock before it.

    Contributions in `rejected` turned out damaged: they are no part of the version, but their rounds end with it.
    """

    id: int
    version: int
    head: str
    history: str
    divisor: int
    progress: int
    contributions: tuple[Contribution, ...]
    rejected: tuple[Contribution, ...]

    @classmethod
    def from_json(cls, text: str) -> Plan:
        value = json.loads(text)
        for name in ("contributions", "rejected"):
            value[name] = tuple(map(Contribution.from_text, value[name]))
        return cls(**value)
