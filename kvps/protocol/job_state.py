"""What a job is at one instant, read in one MULTI: version, clocks, members. And its log, entry by entry."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvps.config import JobConfig
from kvps.errors import CorruptData
from kvps.protocol.plan import Plan
from kvps.staleness import admits

Entry = tuple[str, dict[str, str]]
"""One entry of the commit log: its id, "<ms>-<number>" by the server's clock, and its fields."""


@dataclass(frozen=True)
class Member:
    """A worker as the job knows it; `process` is what it said of its process, see `process.identity`.

    state      active; rejoining, cut off by a restart of the server; or out of the vector clock: draining while
               contributions of it wait, then gone
    evicted    whether it is out of the vector clock without having left
    residual  the name of what is stored of what a lossy format left out of all that was accepted; "" is nothing
    """

    worker: str
    rank: int
    incarnation: str
    state: str
    evicted: bool
    accepted: int
    pending: int
    skip: int
    finished: bool
    residual: str
    clock: int
    host: str
    pid: int
    device: str
    process: Mapping[str, Any] = field(repr=False)

    @classmethod
    def of(cls, worker: str, text: str, committed: int | None, clock: int) -> Member:
        """From its entry in the workers hash, its last committed round (None: all that it pushed is), and its place in
        the vector clock."""
        e = json.loads(text)
        rank = e["rank"]
        pending = 0 if committed is None else e["round"] - committed
        state = e["state"]
        if state not in ("active", "rejoining"):
            state = "draining" if pending else "gone"
        return cls(
            worker=worker,
            rank=rank,
            incarnation=e["incarnation"],
            state=state,
            evicted=e["state"] == "evicted",
            accepted=e["accepted"],
            pending=pending,
            skip=e["round"] - pending - clock,
            finished=e["finished"],
            residual=e.get("residual", ""),
            clock=clock,
            host=e["host"],
            pid=e["pid"],
            device=e["device"],
            process=e,
        )

    @property
    def active(self) -> bool:
        """Whether it is in the vector clock: neither has left nor was evicted."""
        return self.state == "active"

    @property
    def round(self) -> int:
        """Its last committed round."""
        return self.clock + self.skip


class Begin(NamedTuple):
    """What a log goes on from: a version, its head, and how many contributions went into all versions up to it."""

    version: int
    head: str
    contributions: int


@dataclass(frozen=True)
class Turn:
    """What a worker that waits for its turn must know of a job, at one instant: as much for 1,000 workers as for two.

    names   the staged names of the shards
    lowest  the lowest round that is committed of a worker that is not gone; None if there is no worker
    joined  how many workers have ever joined
    me      the worker that asked; None if the job does not know it
    bell    the newest id of the stream of turns: whoever waits behind it is woken when the lowest round changes
    """

    version: int
    id: str
    history: str
    run_id: str
    names: tuple[str, ...]
    lowest: int | None
    joined: int
    me: Member | None
    last_entry: str

    @classmethod
    def of(
        cls,
        worker: str,
        version: Mapping[str, str],
        lowest: Sequence[str],
        joined: int,
        entry: str | None,
        clock: str | None,
        committed: str | float | None,
        turns: Any,
    ) -> Turn:
        """From the replies to HGETALL of version, ZRANGE 0 0 WITHSCORES of rounds, HLEN and HGET of workers, HGET of
        clock, ZSCORE of rounds, and XREVRANGE COUNT 1 of turns."""
        return cls(
            *(int(version["version"]), version["id"], version["history"], version["run_id"], _names(version)),
            int(lowest[1]) if lowest else None,
            joined,
            Member.of(worker, entry, None if committed is None else int(committed), int(clock or 0)) if entry else None,
            turns[0][0] if turns else "0-0",
        )

    def admits(self, rounds_done: int, staleness: int, workers: int) -> bool:
        """Whether a worker that has done `rounds_done` rounds may compute on these weights.

        Until all `workers` have joined once nothing is committed, and nobody goes past the first round: or
        gradients of version 0 would pile up, and be applied all at once.
        """
        if rounds_done > 0 and self.joined < workers:
            return False
        return admits(rounds_done, () if self.lowest is None else (self.lowest,), staleness)


@dataclass(frozen=True)
class State:
    """A job at one instant, with every member. `names` are the staged names of its shards.

    id          the job's own, for ever
    history     new each time the server was restarted and may have lost writes
    run_id      the server's, when that history began
    last_entry  the id of the newest entry of its log
    units       the hash of that name
    begin       from where the job's own log goes on
    moved       what stands in Redis of the log begins with the commit of this version, unless it is 0
    """

    version: int
    head: str
    id: str
    history: str
    run_id: str
    names: tuple[str, ...]
    clock: Mapping[str, int]
    members: Mapping[str, Member]
    units: Mapping[str, str]
    last_entry: str
    begin: Begin
    moved: int

    @classmethod
    def of(
        cls,
        version: Mapping[str, str],
        clock: Mapping[str, str],
        skip: Mapping[str, str],
        workers: Mapping[str, str],
        units: Mapping[str, str],
        log: Any,
    ) -> State:
        """From the replies to HGETALL of version, clock, skip, workers and units, and XREVRANGE COUNT 1 of commits."""
        counts = {worker: int(n) for worker, n in clock.items()}
        members = {}
        for worker, text in workers.items():
            done = counts.get(worker, 0)
            members[worker] = Member.of(worker, text, done + int(skip.get(worker, 0)), done)
        return cls(
            version=int(version["version"]),
            head=version["head"],
            id=version["id"],
            history=version["history"],
            run_id=version["run_id"],
            names=_names(version),
            clock=counts,
            members=members,
            units=units,
            last_entry=log[0][0] if log else "0-0",
            begin=Begin(
                int(version.get("from_version", 0)),
                version.get("from_head") or first_head(version["id"]),
                int(version.get("from_contributions", 0)),
            ),
            moved=int(version.get("moved", 0)),
        )

    @property
    def units_done(self) -> int:
        """How many units of data are committed."""
        return int(self.units.get("done", 0))

    @property
    def settled(self) -> bool:
        """Whether nobody works on it, and all that was pushed is committed."""
        return all(m.state == "gone" for m in self.members.values())

    def finished(self, config: JobConfig) -> bool:
        """Whether all is done and nothing waits.

        That is when all units are committed; where none are handed out, when as many workers as the job wants have
        done all their rounds.
        """
        if not self.settled:
            return False
        if config.units:
            return self.units_done == config.units
        return sum(m.finished for m in self.members.values()) >= config.workers


@dataclass(frozen=True)
class Commit:
    """One entry of the commit log: `plan` made `version`; `shards` are "<term> <digest of the weights>"."""

    version: int
    head: str
    plan: Plan
    shards: tuple[str, ...]
    plan_text: str

    @classmethod
    def of(cls, fields: Mapping[str, str]) -> Commit:
        """From the fields of its entry. Raises CorruptData if those are not a commit's."""
        try:
            text, shards = fields["plan"], tuple(fields["shards"].split(","))
            return cls(int(fields["version"]), fields["head"], Plan.from_json(text), shards, text)
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptData(
                f"commit {fields.get('version')} cannot be read from its log entry: {type(error).__name__}: {error}"
            ) from None

    def follows(self, head: str) -> bool:
        """Whether this entry continues the chain whose head is `head`."""
        return self.head == chained(head, self.plan_text, self.shards) and self.plan.head == head


def _names(version: Mapping[str, str]) -> tuple[str, ...]:
    shards = sum(1 for field in version if field.startswith("shard:"))
    return tuple(version[f"shard:{i}"] for i in range(shards))


class Mirrored(NamedTuple):
    """What Redis was last given of a job over shared memory."""

    version: int
    name: str

    @classmethod
    def of(cls, text: str) -> Mirrored:
        """From the record that `mirror.lua` keeps."""
        record = json.loads(text)
        return cls(int(record["version"]), record["name"])


def first_head(id: str) -> str:
    """The head of a job's version 0."""
    return _sha1(id)


def chained(head: str, plan_text: str, shards: tuple[str, ...]) -> str:
    """The head after a commit: sha1 of the head before, the plan and what was staged, letter by letter as logged."""
    return _sha1(f"{head}\n{plan_text}\n{','.join(shards)}")


def _sha1(text: str) -> str:
    # The only digest that Lua in Redis offers. It chains a log against accidents; it signs nothing.
    return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
