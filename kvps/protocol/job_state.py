"""The state of a job at one instant, read in one MULTI (version, clocks, members), and the entries of its log."""

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
    """A worker as the job knows it. `process` describes its process, as the worker told it; see `process.identity`.

    state     active; rejoining: cut off by a restart of the server; or, out of the vector clock, draining while its
              contributions wait, then gone
    evicted   whether it is out of the vector clock without having left
    residual  the name of the stored residual, which belongs to all that was accepted; "" if none is stored
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
        """Make a member from its entry in the workers hash, its last committed round (None if all that it pushed is
        committed), and its clock."""
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
        """Whether it is in the vector clock and not cut off: it has not left, was not evicted, and is not rejoining."""
        return self.state == "active"

    @property
    def round(self) -> int:
        """The worker's last committed round."""
        return self.clock + self.skip


class Begin(NamedTuple):
    """The point where a log begins: a version, its head, and how many contributions went into all versions up to it."""

    version: int
    head: str
    contributions: int


@dataclass(frozen=True)
class Turn:
    """What a worker must know of a job before it begins a round, at one instant; as much for 1,000 workers as for two.

    names       the staged names of the shards
    lowest      the lowest committed round of the workers that are not gone; None if there is no worker
    joined      how many workers have ever joined
    me          the worker that asked; None if the job does not know it
    last_entry  the newest id of the stream of turns: a wait for an entry after it ends when the lowest round changes
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
        """Make a turn from the replies to HGETALL of version, ZRANGE 0 0 WITHSCORES of rounds, HLEN and HGET of
        workers, HGET of clock, ZSCORE of rounds, and XREVRANGE COUNT 1 of turns."""
        return cls(
            *(int(version["version"]), version["id"], version["history"], version["run_id"], _names(version)),
            int(lowest[1]) if lowest else None,
            joined,
            Member.of(worker, entry, None if committed is None else int(committed), int(clock or 0)) if entry else None,
            turns[0][0] if turns else "0-0",
        )

    def admits(self, rounds_done: int, staleness: int, workers: int) -> bool:
        """Return whether a worker that has done `rounds_done` rounds may compute on these weights.

        Until all `workers` have joined once, nothing is committed and no worker goes past its first round. Otherwise
        gradients of version 0 would pile up and be applied all at once.
        """
        if rounds_done > 0 and self.joined < workers:
            return False
        return admits(rounds_done, () if self.lowest is None else (self.lowest,), staleness)


@dataclass(frozen=True)
class State:
    """The state of a job at one instant, with every member. `names` are the staged names of its shards.

    id          the job's id, which never changes
    history     changes each time the server was restarted, or the shared memory was lost
    run_id      the server's run id when that history began
    last_entry  the id of the newest entry of its log
    units       the content of the hash `units`
    begin       the point where the job's own log begins
    moved       the version with whose commit the log in Redis begins; 0 if Redis has all of it
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
        """Make a state from the replies to HGETALL of version, clock, skip, workers, units, and XREVRANGE COUNT 1 of
        commits."""
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
        """Whether no worker is in the job, and everything that was pushed is committed."""
        return all(m.state == "gone" for m in self.members.values())

    def finished(self, config: JobConfig) -> bool:
        """Return whether all work is done and no contribution waits.

        A job with units is done when all are committed, any other when `workers` workers have done all their rounds.
        """
        if not self.settled:
            return False
        if config.units:
            return self.units_done == config.units
        return sum(m.finished for m in self.members.values()) >= config.workers


@dataclass(frozen=True)
class Commit:
    """A commit in the log: `plan` made `version`, and `shards` has "<term> <digest of the weights>" for each shard."""

    version: int
    head: str
    plan: Plan
    shards: tuple[str, ...]
    plan_text: str

    @classmethod
    def of(cls, fields: Mapping[str, str]) -> Commit:
        """Parse the fields of a log entry. Raises CorruptData if they are not the fields of a commit."""
        try:
            text, shards = fields["plan"], tuple(fields["shards"].split(","))
            return cls(int(fields["version"]), fields["head"], Plan.from_json(text), shards, text)
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptData(
                f"commit {fields.get('version')} cannot be read from its log entry: {type(error).__name__}: {error}"
            ) from None

    def follows(self, head: str) -> bool:
        """Return whether this entry continues the chain whose head is `head`."""
        return self.head == chained(head, self.plan_text, self.shards) and self.plan.head == head


def _names(version: Mapping[str, str]) -> tuple[str, ...]:
    shards = sum(1 for field in version if field.startswith("shard:"))
    return tuple(version[f"shard:{i}"] for i in range(shards))


class Mirrored(NamedTuple):
    """The version that Redis was last given, in a job over shared memory, and its staged name."""

    version: int
    name: str

    @classmethod
    def of(cls, text: str) -> Mirrored:
        """Parse the record that `mirror.lua` keeps."""
        record = json.loads(text)
        return cls(int(record["version"]), record["name"])


def first_head(id: str) -> str:
    """Return the head of a job's version 0."""
    return _sha1(id)


def chained(head: str, plan_text: str, shards: tuple[str, ...]) -> str:
    """Return the head after a commit: sha1 of the head before, the plan and the shards, letter by letter as logged."""
    return _sha1(f"{head}\n{plan_text}\n{','.join(shards)}")


def _sha1(text: str) -> str:
    # SHA-1 is the only digest that Lua in Redis offers. It protects the chain against accidents; it signs nothing.
    return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
