"""The Lua scripts of experience as typed methods, see `kvps.protocol.scripts`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvps.config.rollouts import MOST_ITEM_BYTES
from kvps.errors import InvalidSetting, LeaseLost, UsageError, WrongOrder
from kvps.parsing import Fields
from kvps.protocol.answers import NextUnit, damaged
from kvps.protocol.plan import ITEM_ID
from kvps.protocol.scripts import JobScripts, run_in


class NewItem(NamedTuple):
    """What an actor says of an item whose bytes are stored: its number, its prompt (None for none), the oldest version
    that it was made on with the staged name of that, bytes, chunks, digest and form."""

    seq: int
    unit: int | None
    base: int
    name: str
    nbytes: int
    chunks: int
    digest: str
    form: str


class Took(NamedTuple):
    """The answer to a take: the lots taken; else `why` there are none: "waits" for more, "held" until those that are
    taken have their fate, "done", "stopped", or "more" if it has dropped stale lots and the next call goes on."""

    lots: list[str]
    why: str = ""


class RolloutScripts:
    """The scripts of the experience of one job. Every method may be repeated; what all raise is as for `JobScripts`."""

    def __init__(self, scripts: JobScripts, job: str) -> None:
        self._scripts = scripts
        self._job = job

    def _run(self, script: str, /, *, lasting: bool = False, **values: Any) -> list[Any]:
        reply = self._scripts.run(script, lasting=lasting, **values)
        match reply:
            case ["NONE"]:
                raise UsageError(
                    f"job {self._job!r} takes no experience: its learner says rollouts=kvps.Rollouts(...) when it "
                    f"makes the job"
                )
        return reply

    # -- of actors --------------------------------------------------------------------------------------------

    def enter(self, actor: str, nonce: str, process: Mapping[str, Any]) -> str:
        """Begin an incarnation of an actor, and return it. An earlier one of that name ends."""
        reply = self._run("enter", lasting=True, actor=actor, incarnation="", nonce=nonce, process=json.dumps(process))
        match reply:
            case ["OK", str(incarnation)]:
                return incarnation
            case ["MANY"]:
                raise UsageError(f"job {self._job!r} has too many actors: no more can come until some have left")
        raise damaged(f"actors of job {self._job!r}")

    def beat(self, actor: str, incarnation: str) -> None:
        """Give a sign of life. Raises WorkerEvicted."""
        self._run("enter", actor=actor, incarnation=incarnation, nonce="", process="")

    def quit(self, actor: str, incarnation: str) -> None:
        """End an incarnation."""
        self._run("quit", actor=actor, incarnation=incarnation)

    def prompt(self, actor: str, incarnation: str) -> NextUnit:
        """Return the actor's prompt, handed out now or before. Raises WorkerEvicted."""
        match self._run("prompt", lasting=True, actor=actor, incarnation=incarnation):
            case ["OK", int(unit)]:
                return NextUnit(unit)
            case ["WAIT"]:
                return NextUnit(None)
            case ["DONE"]:
                return NextUnit(None, done=True)
            case ["STOPPED", *run]:
                return NextUnit(None, ends=run_in(run))
        raise damaged(f"units of job {self._job!r}")

    def offer(self, actor: str, incarnation: str, seq: int, nbytes: int) -> str:
        """Reserve room for an item. Return "OK", "FULL", "CLOSED" if the actor has no prompt, or "PAST". Raises
        WorkerEvicted."""
        reply = self._run("offer", actor=actor, incarnation=incarnation, seq=seq, nbytes=nbytes)
        if reply[0] not in ("OK", "FULL", "CLOSED", "PAST"):
            raise damaged(f"rollouts of job {self._job!r}")
        return str(reply[0])

    def put(self, actor: str, incarnation: str, item: NewItem) -> str:
        """Have an item accepted whose bytes are stored, and return its id; "" if it came too late: its prompt is not
        the actor's any more, or its version is too old. Raises WorkerEvicted, InvalidSetting for another form, and
        WrongOrder if the version was lost with the server's last writes."""
        values = item._asdict() | {"unit": "" if item.unit is None else item.unit}
        match self._run("put", lasting=True, actor=actor, incarnation=incarnation, **values):
            case ["OK", str(id)]:
                return id
            case ["CLOSED" | "STALE"]:
                return ""
            case ["FORM", str(form)]:
                raise InvalidSetting(form)
            case ["BASE"]:
                raise WrongOrder(
                    f"version {item.base} of job {self._job!r}, on which the item was made, was lost with its server's "
                    f"last writes"
                )
            case ["OFFER"]:
                raise WrongOrder(f"item {item.seq} of actor {actor!r} has no room reserved: put it again")
        raise damaged(f"rollouts of job {self._job!r}")

    # -- of the learner ---------------------------------------------------------------------------------------

    def claim(self, term: str, number: int, lots: Sequence[str]) -> list[str]:
        """Make `term` the one that takes items, and return which of these `lots` it keeps, each given as
        its name and the ids of its items: the others wait again.
        Raises LeaseLost."""
        return self._numbered("claim", term, number, lots=lots)

    def take(self, term: str, number: int, most: int, least: int, order: str) -> Took:
        """Take up to `most` whole lots; none if there are fewer than `least`, and more may come. Raises LeaseLost."""
        reply = self._run("take", shard=0, term=term, number=number, most=most, least=least, order=order)
        match reply:
            case ["OK", str(lots)]:
                return Took(lots.split())
            case ["PAST"]:
                raise LeaseLost(f"what this learner takes of job {self._job!r} it has taken since")
            case ["MORE"]:
                return Took([], "more")
            case ["EMPTY", *_]:
                return Took([], "waits")
            case ["HELD", *_]:
                return Took([], "held")
            case ["DONE", *_]:
                return Took([], "done")
            case ["STOPPED", *_]:
                return Took([], "stopped")
        raise damaged(f"rollouts of job {self._job!r}")

    def settle(self, term: str, number: int, reason: str, lots: Sequence[str]) -> bool:
        """Reject lots for a `reason`, or with "" give them back. Return False, and change nothing, if the open plan is
        trained on one. Raises LeaseLost, also if one is not taken any more."""
        return bool(self._numbered("settle", term, number, reason=reason, lots=lots) != ["PLANNED"])

    def _numbered(self, script: str, term: str, number: int, **values: Any) -> list[str]:
        match self._run(script, shard=0, term=term, number=number, **values):
            case ["OK", str(lots)]:
                return lots.split()
            case ["PLANNED", _]:
                return ["PLANNED"]
            case ["TAKEN", _] | ["PAST"]:
                raise LeaseLost(f"what this learner has taken of job {self._job!r} is not its own any more")
        raise damaged(f"rollouts of job {self._job!r}")


def items_of(text: object) -> tuple[str, ...]:
    """Return the ids of the items of a lot, from a field of the hash `lots`; none if it is damaged."""
    ids = text.split()[2:] if isinstance(text, str) else []
    return tuple(ids) if all(map(ITEM_ID.fullmatch, ids)) else ()


class Record(NamedTuple):
    """An accepted item without a fate: its oldest version, bytes, chunks, digest, and prompt (None for none)."""

    base: int
    nbytes: int
    chunks: int
    digest: str
    unit: int | None

    @classmethod
    def of(cls, text: object, id: str) -> Record:
        """Parse the field of the hash `items`. Raises CorruptData."""
        words = text.split(" ") if isinstance(text, str) else []
        names = ("base", "nbytes", "chunks", "digest", "unit")
        if len(words) != len(names):
            raise damaged(f"item {id}")
        f = Fields(dict(zip(names, words, strict=True)), f"item {id}")
        unit, nbytes = None if words[-1] == "-" else f.whole("unit"), f.whole("nbytes", 1, MOST_ITEM_BYTES)
        return cls(f.whole("base"), nbytes, f.whole("chunks"), f.word("digest"), unit)
