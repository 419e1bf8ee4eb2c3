"""The open plan of a job, as `plan.lua` wrote it: which contributions, in which order, make the next version. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from kvps.arrays.number_ranges import RANGES, in_all
from kvps.arrays.pieces import Chunk
from kvps.parsing import MOST_GROUP, MOST_TAKEN, NAME, Fields, refuse

_MOST_CONTRIBUTIONS = 1 << 20
_MOST_BY = 300
_TEXT = re.compile(
    rf"({NAME.pattern}) ([A-Za-z0-9-]{{1,80}}) (\d{{1,16}}) (\d{{1,16}}) (\d{{1,16}}) (\d{{1,16}}) (-|\d{{1,16}}) "
    rf"([A-Za-z0-9,-]{{1,65536}})(?: ({NAME.pattern}))?(?: lacks:({RANGES}))?",
    re.ASCII,
)

ITEM_ID = re.compile(rf"({NAME.pattern})\.([0-9]{{1,16}}-[A-Za-z0-9]{{1,32}}):([0-9]{{1,16}})", re.ASCII)
"""The id of an item of experience: actor, incarnation and number."""
_ITEM = re.compile(
    rf"((?:{NAME.pattern})\.[0-9]{{1,16}}-[A-Za-z0-9]{{1,32}}:[0-9]{{1,16}}) (-|\d{{1,16}}) (\d{{1,16}})"
)
_MOST_TRAINED = MOST_TAKEN * MOST_GROUP
_MOST_ITEMS_TEXT = 1 << 20


def set_lr(fields: Fields) -> float | None:
    """Return the learning rate that was set for a job, from fields that may have one. Raises CorruptData."""
    lr = fields.number("lr", default=-1)
    return lr if lr >= 0 else None


class Contribution(NamedTuple):
    """One worker's gradient for one round, as inbox, open plan and log name it; `unit` is the unit of data it used,
    `part` the part of the model that it is of, "" for all of it, and `lacks` are the parameters that have no gradient
    in it, as `number_ranges` writes their numbers: its bytes have zeros for them."""

    worker: str
    incarnation: str
    seq: int
    round: int
    base: int
    weight: int
    digest: str
    unit: int | None = None
    part: str = ""
    lacks: str = ""

    @classmethod
    def from_text(cls, text: object) -> Contribution:
        """Parse "worker incarnation seq round base weight unit digest", the part if it is of one, and "lacks:..." if it
        lacks a parameter, as `push.lua` writes it. Raises CorruptData."""
        match = _TEXT.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            refuse("a contribution", "worker, incarnation, numbers and digest", text)
        worker, incarnation, seq, round_, base, weight, unit, digest, part, lacks = match.groups()
        unit_ = None if unit == "-" else int(unit)
        numbers = int(seq), int(round_), int(base), int(weight)
        return cls(worker, incarnation, *numbers, digest, unit_, part or "", lacks or "")

    @property
    def text(self) -> str:
        """The text that `from_text` parses."""
        unit = "-" if self.unit is None else self.unit
        words = (self.worker, self.incarnation, self.seq, self.round, self.base, self.weight, unit, self.digest)
        behind = [*([self.part] if self.part else []), *([f"lacks:{self.lacks}"] if self.lacks else [])]
        return " ".join(map(str, (*words, *behind)))

    @property
    def digests(self) -> list[str]:
        """The digest of each shard's part."""
        return self.digest.split(",")


class TrainedItem(NamedTuple):
    """An item of experience as the log names it with its fate: its id, "<actor>.<incarnation>:<number>", its prompt
    (None for none), and the oldest version that it was made on."""

    id: str
    unit: int | None
    base: int

    @classmethod
    def from_text(cls, text: object) -> TrainedItem:
        """Parse "id prompt base", as the scripts write it. Raises CorruptData."""
        match = _ITEM.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            refuse("an item of experience", "its id, prompt and version", text)
        id, unit, base = match.groups()
        return cls(id, None if unit == "-" else int(unit), int(base))

    @classmethod
    def all_in(cls, f: Fields) -> list[TrainedItem]:
        """Return the items of an entry `stale` or `rejected` of the log. Raises CorruptData."""
        return [cls.from_text(text) for text in f.text("items", _MOST_ITEMS_TEXT).split(",")]


@dataclass(frozen=True)
class Plan:
    """The contributions that make the next version. `progress` is the sum of the vector clock before it.

    Contributions in `rejected` turned out damaged: they are no part of the version, but their rounds end with it. `lr`
    is the learning rate that somebody has set for the job; None if the optimizer's own is used. Of a version that a
    learner published, `by` says who that is, `loss` what it said of the weights, and `trained` on which items of
    experience it trained.
    """

    id: int
    version: int
    head: str
    history: str
    divisor: int
    progress: int
    contributions: tuple[Contribution, ...]
    rejected: tuple[Contribution, ...]
    lr: float | None = None
    by: str = ""
    loss: float | None = None
    trained: tuple[TrainedItem, ...] = ()

    @property
    def counting(self) -> list[Contribution]:
        """The contributions that do not count as zeros."""
        return [c for c in self.contributions if c.weight]

    def has(self, chunk: Chunk) -> bool:
        """Return whether any contribution has a chunk. Without one, its version has the chunk of the version before."""
        return any(chunk.in_part(c.part) for c in self.contributions)

    def counting_in(self, chunk: Chunk) -> list[Contribution]:
        """The contributions that count, and have the part of the model that a chunk is of."""
        return [c for c in self.counting if chunk.in_part(c.part)]

    def left_out(self, part: str) -> frozenset[int]:
        """Return the numbers of the parameters of a part that have a gradient in no contribution, though some are of
        that part: the version has them as they were before. Raises CorruptData."""
        each = [c.lacks for c in self.contributions if c.part in ("", part)]
        return in_all(tuple(each)) if each and all(each) else frozenset()

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
            lr=set_lr(f),
            by=f.text("by", _MOST_BY, default=""),
            loss=f.number("loss") if "loss" in f else None,
            trained=tuple(map(TrainedItem.from_text, f.sequence("trained", _MOST_TRAINED))) if "trained" in f else (),
        )
