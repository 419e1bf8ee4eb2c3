"""The experience of a published job as anybody may see it: what waits, who sends it, and the fate of each item."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from kvps.config.rollouts import Rollouts
from kvps.errors import UsageError
from kvps.history.commit_log import Log
from kvps.history.log_stream import LogStream
from kvps.parsing import LARGEST, Fields, whole
from kvps.protocol.job_state import Commit
from kvps.protocol.plan import TrainedItem
from kvps.protocol.rollout_scripts import Record
from kvps.transport.opening import OpenedJob

_MOST_ITEMS_TEXT = 1 << 20


class ItemFate(NamedTuple):
    """What became of one item that was accepted.

    id       "<actor>.<incarnation>:<number>"
    fate     trained, stale or rejected, as the log says; else taken or waiting
    version  trained: in the making of that version; stale and rejected: when that was the newest one; else None
    unit     the prompt that it answers; None where there are none
    reason   why it was rejected; for a stale one "again" if its prompt was handed out again, else "drop"
    """

    id: str
    fate: str
    version: int | None
    unit: int | None
    reason: str = ""


class ActorNow(NamedTuple):
    """An actor: its name, how many items were accepted of its present incarnation, the version that the last one was
    made on (None before the first), its prompt, its host, and for how many seconds it has been silent."""

    name: str
    items: int
    version: int | None
    unit: int | None
    host: str
    silent_s: float


class RolloutsNow(NamedTuple):
    """The experience of a job at one instant: `waiting` and `taken` items that have no fate yet, `offered` ones that
    are on their way, the bytes of all of them; how many had which fate; prompts that were handed out, and those that
    have had their fate; how many of the items without a fate are how stale for the next version; and the actors."""

    waiting: int
    taken: int
    offered: int
    nbytes: int
    trained: int
    stale: int
    rejected: int
    handed_out: int
    closed: int
    staleness: Mapping[int, int]
    actors: list[ActorNow]


class JobRollouts:
    """The experience of one job; `Job.rollouts`."""

    def __init__(self, access: OpenedJob) -> None:
        self._access = access

    @property
    def settings(self) -> Rollouts:
        """What the learner has set. Raises UsageError if the job takes no experience."""
        if text := self._access.config.metadata.rollouts:
            return Rollouts.of(text)
        raise UsageError(f"job {self._access.keys.job!r} takes no experience: no learner publishes it, or it is old")

    def now(self) -> RolloutsNow:
        """Return what there is at this instant. Raises UsageError, CorruptData."""
        self.settings  # noqa: B018  raises
        k = self._access.keys
        hashes = [("HGETALL", key) for key in (k.rollouts, k.items, k.lots, k.units, k.actors)]
        others = [("ZRANGE", k.actor_beats, 0, -1, "WITHSCORES"), ("SMEMBERS", k.taken_lots), ("TIME",)]
        *replies, version = self._access.client.together([*hashes, *others, ("HGET", k.version, "version")])
        numbers, items, lots, units, actors, beats, taken, now = replies
        records = [Record.of(text, id) for id, text in items.items()]
        of_taken = sum(len(lots.get(lot, "").split()) - 2 for lot in taken if lot in lots)
        n, u, newest = Fields(numbers, "rollouts"), Fields(units, "units"), whole(version, "the version")
        staleness: dict[int, int] = {}
        for record in records:
            late = newest - record.base
            staleness[late] = staleness.get(late, 0) + 1
        seen = {name: float(score) for name, score in zip(beats[::2], beats[1::2], strict=True)}
        now_ms = int(now[0]) * 1000 + int(now[1]) // 1000
        return RolloutsNow(
            waiting=len(records) - of_taken,
            taken=of_taken,
            offered=n.whole("offers", default=0),
            nbytes=n.whole("bytes", default=0) + n.whole("offered_bytes", default=0),
            trained=n.whole("trained", default=0),
            stale=n.whole("stale", default=0),
            rejected=n.whole("rejected", default=0),
            handed_out=u.whole("next", default=0),
            closed=u.whole("done", default=0),
            staleness=dict(sorted(staleness.items())),
            actors=[
                _actor(name, text, (now_ms - seen.get(name, now_ms)) / 1000) for name, text in sorted(actors.items())
            ],
        )

    def live(self) -> set[str]:
        """Return the ids of items without a fate, and of those that may still be accepted."""
        k = self._access.keys
        items, actors = self._access.client.together([("HKEYS", k.items), ("HGETALL", k.actors)])
        entries = {name: Fields.of_json(text, f"actor {name!r}", 1 << 16, deepest=1) for name, text in actors.items()}
        offered = {
            f"{name}.{f.word('incarnation')}:{f.whole('offered')}"
            for name, f in entries.items()
            if "offered_bytes" in f
        }
        return {*items, *offered}

    def fates(self, directory: Path | str | None = None) -> list[ItemFate]:
        """Return one record of each item that was accepted, as far back as the log goes: those with a fate in the order
        of the log, then those without. With a `directory`, that of checkpoints, also what was moved there from Redis.
        Raises CorruptData."""
        found: dict[str, ItemFate] = {}
        without = self._without_fate()  # first: what gets its fate meanwhile is in the log that is read then
        state, stream = self._access.reader.state(), LogStream(self._access)
        log = Log(stream, state, Path(directory) if directory else None)
        for fields in log.entries():
            kind = fields.get("kind")
            f = Fields(fields, "an entry of the log")
            if kind == "recover":  # what came after that version was lost, and waits again
                found = {id: each for id, each in found.items() if (each.version or 0) <= f.whole("version")}
            elif kind == "commit":
                commit = Commit.of(fields)
                found |= {i.id: ItemFate(i.id, "trained", commit.version, i.unit) for i in commit.plan.trained}
            elif kind in ("stale", "rejected"):
                reason = f.text("then" if kind == "stale" else "reason", default="")
                for item in map(TrainedItem.from_text, f.text("items", _MOST_ITEMS_TEXT).split(",")):
                    found[item.id] = ItemFate(item.id, kind, f.whole("version", high=LARGEST), item.unit, reason)
        return [*found.values(), *(each for each in without if each.id not in found)]

    def _without_fate(self) -> list[ItemFate]:
        k = self._access.keys
        items, lots, taken = self._access.client.together(
            [("HGETALL", k.items), ("HGETALL", k.lots), ("SMEMBERS", k.taken_lots)]
        )
        taken_ids = {id for lot in taken for id in lots.get(lot, "").split()[2:]}
        return [
            ItemFate(id, "taken" if id in taken_ids else "waiting", None, Record.of(text, id).unit)
            for id, text in items.items()
        ]


def _actor(name: str, text: str, silent_s: float) -> ActorNow:
    f = Fields.of_json(text, f"actor {name!r}", 1 << 16, deepest=1)
    version = f.whole("version") if "version" in f else None
    unit = f.whole("unit") if "unit" in f else None
    return ActorNow(name, f.whole("items"), version, unit, f.text("host"), max(0.0, silent_s))
