"""The open plan of a job, as `plan.lua` wrote it: which contributions, in which order, make the next version. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import NamedTuple


class Contribution(NamedTuple):
    """One worker's gradient for one round, as an open plan or the commit log names it; `unit` is the data it used."""

    worker: str
    incarnation: str
    seq: int
    round: int
    base: int
    weight: int
    digest: str
    id: str
    unit: int | None = None

    @property
    def digests(self) -> list[str]:
        """The digest of each shard's part."""
        return self.digest.split(",")


@dataclass(frozen=True)
class Plan:
    """What makes the next version. `progress` is the sum of the vector clock before it.

    `rejected` were planned and turned out bad: they make no part of the version, but their rounds end with it.
    """

    id: int
    version: int
    head: str
    history: str
    divisor: int
    progress: int
    members: tuple[str, ...]
    contributions: tuple[Contribution, ...]
    rejected: tuple[Contribution, ...]

    @classmethod
    def from_json(cls, text: str) -> Plan:
        value = json.loads(text)
        value["members"] = tuple(value["members"])
        for name in ("contributions", "rejected"):
            value[name] = tuple(Contribution(**c) for c in value[name])
        return cls(**value)
