"""The open plan of a job, as `plan.lua` wrote it: which contributions, in which order, make the next version. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from kvps.parsing import Fields, refuse

_MOST_CONTRIBUTIONS = 1 << 20
_TEXT = re.compile(
    r"([A-Za-z0-9_-]{1,64}) ([A-Za-z0-9-]{1,80}) (\d{1,16}) (\d{1,16}) (\d{1,16}) (\d{1,16}) (-|\d{1,16}) "
    r"([A-Za-z0-9,-]{1,65536})",
    re.ASCII,
)


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
    def from_text(cls, text: object) -> Contribution:
        """Parse "worker incarnation seq round base weight unit digest", as `push.lua` writes it. Raises CorruptData."""
        found = _TEXT.fullmatch(text) if isinstance(text, str) else None
        if found is None:
            refuse("a contribution", "worker, incarnation, numbers and digest", text)
        worker, incarnation, seq, round_, base, weight, unit, digest = found.groups()
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

    @property
    def counting(self) -> list[Contribution]:
        """The contributions that do not count as zeros."""
        return [c for c in self.contributions if c.weight]

    @classmethod
    def from_json(cls, text: object) -> Plan:
        """Parse the JSON that `plan.lua` writes. Raises CorruptData."""
        f = Fields.of_json(text, "a plan")

        def contributions(field: str) -> tuple[Contribution, ...]:
            return tuple(map(Contribution.from_text, f.sequence(field, _MOST_CONTRIBUTIONS)))

        return cls(
            id=f.whole("id"),
            version=f.whole("version"),
            head=f.word("head"),
            history=f.word("history"),
            divisor=f.whole("divisor", 1),
            progress=f.whole("progress"),
            contributions=contributions("contributions"),
            rejected=contributions("rejected"),
        )
