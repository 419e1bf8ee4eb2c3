"""What has happened to a job, oldest first, from the commit log, the leases and the evaluations. Nothing is written.

The three streams have ids by the server's clock, so their entries are in one order whatever the clocks of hosts say.
The time of an entry is a field: ids never go back where the server's clock was set back.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from heapq import merge
from typing import Any, NamedTuple

from kvps.connection.client import Client
from kvps.errors import CorruptData, InvalidSetting
from kvps.history.evaluations import Evaluation
from kvps.history.log_stream import entries_after
from kvps.parsing import Fields, entry_ms
from kvps.protocol.job_state import Commit, Entry
from kvps.protocol.keys import JobKeys
from kvps.protocol.plan import Contribution, TrainedItem

_ID = re.compile(r"[0-9]{1,15}-[0-9]{1,19}", re.ASCII)
_AT_ONCE = 1_000  # entries of a stream that are read in one request


class Event(NamedTuple):
    """An entry of one of the streams: the server's time when it was written, in ms since 1970; what happened; and the
    facts that `kvps log --json` prints, by name."""

    at_ms: int
    kind: str
    facts: dict[str, Any]

    @classmethod
    def of(cls, entry: Entry) -> Event:
        """Parse an entry. Raises CorruptData."""
        id, fields = entry
        f = Fields(fields, f"entry {id} of the log")
        kind = f.one_of("kind", list(_FACTS))
        return cls(entry_ms(id, fields), kind, _FACTS[kind](f, fields))


class EventLog:
    """The events of one job. A call of `newest` reads what there is, and `later` and `unread` go on from there."""

    def __init__(self, client: Client, keys: JobKeys) -> None:
        self._client = client
        self._kinds = {keys.evaluations: {"kind": "evaluate"}}  # who may write there can note nothing else
        streams = keys.commits, keys.leases, keys.evaluations
        self._seen = dict.fromkeys(streams, "0-0")  # stream -> the last id that was read

    def newest(self, count: int) -> list[Event]:
        """Return the newest `count` events, or all that Redis has for 0. Raises CorruptData."""
        return self._merged(self._back_from("+", count) if count else self._after_seen())[-count:]

    def unread(self, most: int = _AT_ONCE) -> Iterator[list[Event]]:
        """Yield the events after those that were read in pages, each with up to `most` of each stream in its order. The
        last is one that is not full, as of `entries_after`. A call that raises ServerLost has read none. Raises
        CorruptData."""
        pages: list[list[Entry]] = []
        while not pages or any(len(page) == most for page in pages):
            asked = [("XRANGE", stream, f"({last}", "+", "COUNT", most) for stream, last in self._seen.items()]
            pages = self._entries(self._client.together(asked))
            yield self._merged(pages)

    def before(self, id: str, count: int) -> list[tuple[str, Event]]:
        """Return the newest `count` events before the entry with this id, "" for the end of the log, each with its own
        id, oldest first. It has more than `count` only where two entries have the same id. What `newest` and `later`
        return is not changed by it. Raises InvalidSetting for what is no id, CorruptData."""
        if id and not _ID.fullmatch(id):
            raise InvalidSetting(f"{id[:40]!r} is no id of an entry: these look like 1700000000000-0")
        if id and _place(id) == (0, 0):  # nothing is before it, and Redis calls the question an error
            return []
        entries = list(merge(*self._back_from(f"({id}" if id else "+", count), key=_order))
        first = _order(entries[-count]) if len(entries) > count else (0, 0)
        return [(entry[0], Event.of(entry)) for entry in entries if _order(entry) >= first]

    def later(self, poll: Callable[[], object]) -> Iterator[Event]:
        """Yield each event after those that were read, as it happens. While there is none, call `poll` now and then: it
        ends this by an error. Raises CorruptData."""
        while True:
            if self._client.wait(self._seen):
                yield from self._merged(self._after_seen())
            else:
                poll()

    def _back_from(self, end: str, count: int) -> list[list[Entry]]:
        """Return the newest `count` entries of each stream up to the id `end`, oldest first."""
        asked = [("XREVRANGE", stream, end, "-", "COUNT", count) for stream in self._seen]
        return self._entries(map(reversed, self._client.together(asked)))

    def _after_seen(self) -> list[list[Entry]]:
        return self._entries(entries_after(self._client, stream, last) for stream, last in self._seen.items())

    def _entries(self, pages: Iterable[Iterable[Any]]) -> list[list[Entry]]:
        """Return a page of each stream as entries that have a kind."""
        return [
            [(id, fields | self._kinds.get(stream, {})) for id, fields in page]
            for stream, page in zip(self._seen, pages, strict=True)
        ]

    def _merged(self, pages: list[list[Entry]]) -> list[Event]:
        """Note the last entry of each stream as read; return all in the order of their ids."""
        self._seen |= {stream: entries[-1][0] for stream, entries in zip(self._seen, pages, strict=True) if entries}
        return [Event.of(entry) for entry in merge(*pages, key=_order)]


def _order(entry: Entry) -> tuple[int, int]:
    return _place(entry[0])


def _place(id: str) -> tuple[int, int]:
    """Return the time of a stream's id, in ms, and its number within that ms."""
    ms, _, number = id.partition("-")
    return int(ms), int(number)


# -- the facts of each kind of event ----------------------------------------------------------------------------------


def _commit(f: Fields, fields: dict[str, str]) -> dict[str, Any]:
    commit = Commit.of(fields)
    version, plan = commit.version, commit.plan
    if plan.by:
        known = {"version": version, "contributions": [], "rejected": [], "by": plan.by, "loss": plan.loss}
        return known | ({"trained": len(plan.trained)} if plan.trained else {})
    return {
        "version": version,
        "contributions": [_contribution(version, c) for c in plan.contributions],
        "rejected": [_contribution(version, c) for c in plan.rejected],
    }


def _contribution(version: int, c: Contribution) -> dict[str, Any]:
    """Return the facts of a contribution. `staleness` is how many versions came between the one that it was computed on
    and the one before this."""
    known = {"worker": c.worker, "round": c.round, "base": c.base, "staleness": max(0, version - 1 - c.base)}
    return known | {"weight": c.weight, "unit": c.unit, "part": c.part} | ({"lacks": c.lacks} if c.lacks else {})


def _fate(f: Fields, why: str) -> dict[str, Any]:
    """Return the facts of experience that was not trained on: how many items, and `why`, the field of that name."""
    return {
        "version": f.whole("version"),
        "items": len(TrainedItem.all_in(f)),
        why: f.one_of(why, ["again", "drop"]) if why == "then" else f.text(why),
    }


def _lease(f: Fields, fields: dict[str, str]) -> dict[str, Any]:
    """The number in a term grows with each holder of a shard."""
    parts = f.word("term").split("-")
    if len(parts) != 3 or not parts[1].isdecimal():
        raise CorruptData(
            f"the log of leases has the term {f.word('term')!r}, and that is none: another program wrote it"
        )
    return {"holder": f.text("holder"), "term": int(parts[1])}


def _asked(f: Fields, fields: dict[str, str]) -> dict[str, Any]:
    facts = {"by": f.text("by", default=""), "reason": f.text("reason", default="")}
    return facts | ({"round": f.whole("round")} if "round" in fields else {})


def _set(f: Fields, fields: dict[str, str]) -> dict[str, Any]:
    """A learning rate of None says that the optimizer's own is used again."""
    return {"lr": f.number("lr") if fields.get("lr") else None} | _asked(f, fields)


_FACTS: dict[str, Any] = {
    "create": lambda f, _: {"version": f.whole("version")},
    "restore": lambda f, fields: (
        {"version": f.whole("version"), "job": f.name("job")}
        | ({"settings": f.json_fields("settings").as_dict()} if fields.get("settings") else {})
    ),
    "adopt": lambda f, _: {"by": f.text("by")},
    "join": lambda f, _: {"worker": f.name("worker"), **{n: f.whole(n) for n in ("rank", "round", "clock")}},
    "leave": lambda f, _: {"worker": f.name("worker")},
    "evict": lambda f, _: {"worker": f.name("worker"), "reason": f.text("reason", default="")},
    "commit": _commit,
    "reject": lambda f, _: {"worker": f.name("worker"), "round": f.whole("round"), "reason": f.text("reason")},
    "backup": lambda f, _: {n: f.name(n) for n in ("worker", "of")} | {n: f.whole(n) for n in ("unit", "out_ms")},
    "duplicate": lambda f, _: {"worker": f.name("worker"), "unit": f.whole("unit")},
    "recover": lambda f, _: {"version": f.whole("version"), "lost": f.whole("lost")},
    "take": lambda f, fields: {"shard": f.whole("shard"), **_lease(f, fields)},
    "release": _lease,
    "evaluate": lambda f, fields: Evaluation.of(fields, 0, "an evaluation in the log").facts,
    **dict.fromkeys(("stop", "suspend", "pause", "resume"), _asked),
    "set": _set,
    "stale": lambda f, _: _fate(f, "then"),
    "rejected": lambda f, _: _fate(f, "reason"),
    "gone": lambda f, _: {"actor": f.name("actor"), "reason": f.text("reason")},
    "scale": lambda f, _: {"workers": f.whole("workers"), "before": f.whole("before")},
}
