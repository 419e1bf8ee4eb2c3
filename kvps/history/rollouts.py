"""The experience of a published job as anybody may see it: what waits, who sends it, and the fate of each item."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from kvps.config.rollouts import Rollouts, rollouts_of
from kvps.history.commit_log import Log
from kvps.history.log_stream import LogStream
from kvps.parsing import Fields, entry_ms, number, whole
from kvps.protocol.job_state import Commit
from kvps.protocol.plan import TrainedItem
from kvps.protocol.rollout_scripts import Record
from kvps.transport.opening import OpenedJob

_COUNTS = ("offers", "bytes", "offered_bytes", "trained", "stale", "rejected")


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

    @property
    def facts(self) -> dict[str, Any]:
        """All of it as JSON."""
        return self._asdict() | {"actors": [actor._asdict() for actor in self.actors]}

    @property
    def brief(self) -> dict[str, int]:
        """What one line says: how many items wait, are taken and were dropped, and how many actors there are."""
        dropped = self.stale + self.rejected
        return {"waiting": self.waiting, "taken": self.taken, "dropped": dropped, "actors": len(self.actors)}


class JobRollouts:
    """The experience of one job; `Job.rollouts`."""

    def __init__(self, access: OpenedJob) -> None:
        self._access = access

    @cached_property
    def settings(self) -> Rollouts:
        """What the learner has set. Raises UsageError if the job takes no experience."""
        return rollouts_of(self._access.keys.job, self._access.config.metadata.rollouts)

    def now(self, staleness: bool = True) -> RolloutsNow:
        """Return what there is at this instant. With `staleness` False, that is left empty, and no item is read. Raises
        UsageError, CorruptData."""
        group, k = self.settings.group, self._access.keys
        counts, prompts, items, lots, actors, beats, now, version, *read = self._access.client.together(
            [
                ("HMGET", k.rollouts, *_COUNTS),
                ("HMGET", k.units, "next", "done"),
                ("HLEN", k.items),
                ("ZCARD", k.taken_lots),
                ("HGETALL", k.actors),
                ("ZRANGE", k.actor_beats, 0, -1, "WITHSCORES"),
                ("TIME",),
                ("HGET", k.version, "version"),
                *([("HGETALL", k.items)] if staleness else []),
            ]
        )
        n = dict(zip(_COUNTS, (whole(count or 0, "rollouts") for count in counts), strict=True))
        handed_out, closed = (whole(count or 0, "the prompts") for count in prompts)
        newest, taken = whole(version, "the version"), lots * group  # whole lots alone are taken
        late = Counter(newest - Record.of(text, id).base for all_items in read for id, text in all_items.items())
        seen = {name: number(ms, "a sign of life") for name, ms in zip(beats[::2], beats[1::2], strict=True)}
        now_ms = int(now[0]) * 1000 + int(now[1]) // 1000
        return RolloutsNow(
            waiting=items - taken,
            taken=taken,
            offered=n["offers"],
            nbytes=n["bytes"] + n["offered_bytes"],
            trained=n["trained"],
            stale=n["stale"],
            rejected=n["rejected"],
            handed_out=handed_out,
            closed=closed,
            staleness=dict(sorted(late.items())),
            actors=[
                _actor(name, text, (now_ms - seen.get(name, now_ms)) / 1000) for name, text in sorted(actors.items())
            ],
        )

    def per_second(self, newest: int = 50) -> dict[str, float]:
        """Return actor -> how many items of it have had their fate in a second, as the `newest` entries of the log say:
        from the oldest of them until now. Raises CorruptData."""
        entries = self._access.client.call("XREVRANGE", self._access.keys.commits, "+", "-", "COUNT", newest)
        if not entries:
            return {}
        *later, first = entries
        each = 1 / max(0.001, self._access.server.seconds() - entry_ms(*first) / 1000)
        ended = Counter(fate.id.rpartition(".")[0] for _, fields in later for fate in _fates_in(fields))
        return {actor: items * each for actor, items in ended.items()}

    def if_any(self) -> RolloutsNow | None:
        """Return `now` without its staleness; None if the job takes no experience, or nobody has sent any."""
        if not self._access.config.metadata.rollouts:
            return None
        now = self.now(staleness=False)
        return now if any((*now.brief.values(), now.offered, now.trained)) else None

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
            if fields.get("kind") in ("recover", "restore"):  # what came after that version was lost, and waits again
                version = Fields(fields, "an entry of the log").whole("version")
                found = {id: each for id, each in found.items() if (each.version or 0) <= version}
            found |= {fate.id: fate for fate in _fates_in(fields)}
        return [*found.values(), *(each for each in without if each.id not in found)]

    def _without_fate(self) -> list[ItemFate]:
        k = self._access.keys
        items, lots, taken = self._access.client.together(
            [("HGETALL", k.items), ("HGETALL", k.lots), ("ZRANGE", k.taken_lots, 0, -1)]
        )
        taken_ids = {id for lot in taken for id in lots.get(lot, "").split()[2:]}
        return [
            ItemFate(id, "taken" if id in taken_ids else "waiting", None, Record.of(text, id).unit)
            for id, text in items.items()
        ]


def _fates_in(fields: Mapping[str, str]) -> Iterator[ItemFate]:
    """Yield the fates that an entry of the log tells. Raises CorruptData."""
    kind = fields.get("kind")
    if kind == "commit":
        commit = Commit.of(fields)
        yield from (ItemFate(i.id, "trained", commit.version, i.unit) for i in commit.plan.trained)
    elif kind in ("stale", "rejected"):
        f = Fields(fields, "an entry of the log")
        version, reason = f.whole("version"), f.text("then" if kind == "stale" else "reason", default="")
        yield from (ItemFate(i.id, kind, version, i.unit, reason) for i in TrainedItem.all_in(f))


def _actor(name: str, text: str, silent_s: float) -> ActorNow:
    f = Fields.of_json(text, f"actor {name!r}", 1 << 16, deepest=1)
    version = f.whole("version") if "version" in f else None
    unit = f.whole("unit") if "unit" in f else None
    return ActorNow(name, f.whole("items"), version, unit, f.text("host"), max(0.0, silent_s))
