"""The state of a job at one instant, read in one MULTI (version, clocks, members), and the entries of its log."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from kvps.config import JobConfig
from kvps.errors import CorruptData
from kvps.notebook import workers_table
from kvps.parsing import JOB_ID, LARGEST_RANK, STAGED_NAME, Fields, name, whole
from kvps.protocol.plan import Plan, set_lr
from kvps.protocol.run_control import RunControl
from kvps.staleness import admits

_STATES = ("active", "rejoining", "left", "evicted")
_MOST_ENTRY, _MOST_PLAN = 1 << 16, 64 << 20  # characters

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
        e = Fields.of_json(text, f"worker {worker!r}", _MOST_ENTRY, deepest=1)
        round_, state = e.whole("round"), e.one_of("state", _STATES)
        pending = 0 if committed is None else round_ - committed
        return cls(
            worker=name(worker, "a worker's name"),
            rank=e.whole("rank", high=LARGEST_RANK),
            incarnation=e.word("incarnation"),
            state=state if state in ("active", "rejoining") else "draining" if pending else "gone",
            evicted=state == "evicted",
            accepted=e.whole("accepted"),
            pending=pending,
            skip=round_ - pending - clock,
            finished=e.flag("finished"),
            residual=e.text("residual", default=""),
            clock=clock,
            host=e.text("host"),
            pid=e.whole("pid", high=2**31),
            device=e.text("device"),
            process=e.as_dict(),
        )

    @property
    def active(self) -> bool:
        """Whether it is in the vector clock and not cut off: it has not left, was not evicted, and is not rejoining."""
        return self.state == "active"

    @property
    def awaited(self) -> bool:
        """Whether the others wait for it until it joins, because it was at work when the job was saved, or when the
        command that launched it ended."""
        return self.state == "rejoining" and bool(self.process.get("awaited"))

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
class RoundState:
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
    _version: Fields = field(repr=False, compare=False)

    @cached_property
    def run(self) -> RunControl:
        """Whether the job goes on."""
        return RunControl.of(self._version)

    @property
    def before(self) -> tuple[str, ...]:
        """The staged names of the shards one version ago."""
        return _names(self._version, len(self.names), "before")

    @classmethod
    def of(
        cls,
        worker: str,
        shards: int,
        version: Mapping[str, str],
        lowest: Sequence[str],
        joined: int,
        entry: str | None,
        clock: str | None,
        committed: str | float | None,
        turns: Any,
    ) -> RoundState:
        """Make the round state of a job with so many shards from the replies to HGETALL of version, ZRANGE 0 0
        WITHSCORES of rounds, HLEN and HGET of workers, HGET of clock, ZSCORE of rounds, XREVRANGE COUNT 1 of turns."""
        v, me = Fields(version, "the version"), None
        if entry is not None:
            done = None if committed is None else whole(committed, f"the round of worker {worker!r}")
            me = Member.of(worker, entry, done, whole(clock or 0, f"the clock of worker {worker!r}"))
        return cls(
            version=v.whole("version"),
            id=v.matching("id", *JOB_ID),
            history=v.word("history"),
            run_id=v.word("run_id"),
            names=_names(v, shards),
            lowest=whole(lowest[1], "the lowest round") if lowest else None,
            joined=joined,
            me=me,
            last_entry=turns[0][0] if turns else "0-0",
            _version=v,
        )

    def admits(self, rounds_done: int, config: JobConfig) -> bool:
        """Return whether a worker that has done `rounds_done` rounds may compute on these weights.

        Until all workers have joined once, nothing is committed and no worker goes past its first round. Otherwise
        gradients of version 0 would pile up and be applied all at once. With a quorum, a worker waits for the version
        that its last round was for, with or without its contribution, and for its own contribution.
        """
        if rounds_done > 0 and self.joined < config.workers:
            return False
        if config.partial_rounds:
            return self.version >= rounds_done and (self.me is None or not self.me.pending)
        return admits(rounds_done, () if self.lowest is None else (self.lowest,), config.staleness)


@dataclass(frozen=True)
class State:
    """The state of a job at one instant, with every member. `names` are the staged names of its shards.

    id          the job's id, which never changes
    history     changes each time the server was restarted, or the shared memory was lost
    run_id      the server's run id when that history began
    last_entry  the id of the newest entry of its log
    units       the content of the hash `units`
    begin       the point where the job's own log begins
    run         whether the job goes on, is paused, suspended or stopped
    lr          the learning rate that somebody has set; None if the optimizer's own is used
    states      the content of the hash `states`; {} if it was not asked for
    experience  the hashes rollouts, items and lots; () if that was not asked for, or no learner publishes the job
    moved       the version with whose commit the log in Redis begins (others were moved or deleted); 0 if it is whole
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
    run: RunControl
    lr: float | None
    states: Mapping[str, str]
    experience: Sequence[Mapping[str, str]] = ()

    @classmethod
    def of(
        cls,
        shards: int,
        version: Mapping[str, str],
        clock: Mapping[str, str],
        skip: Mapping[str, str],
        workers: Mapping[str, str],
        units: Mapping[str, str],
        log: Any,
        states: Mapping[str, str] | None = None,
    ) -> State:
        """Make a state of a job with so many shards from the replies to HGETALL of version, clock, skip, workers,
        units, XREVRANGE COUNT 1 of commits, and HGETALL of states if that was asked for."""
        v, units_of = Fields(version, "the version"), Fields(units, "units")
        for number in ("next", "done"):
            units_of.whole(number, default=0)
        counts = {worker: whole(count, f"the clock of worker {worker!r}") for worker, count in clock.items()}
        members = {}
        for worker, text in workers.items():
            done = counts.get(worker, 0)
            round_ = done + whole(skip.get(worker, 0), f"the skipped rounds of worker {worker!r}")
            members[worker] = Member.of(worker, text, round_, done)
        id = v.matching("id", *JOB_ID)
        return cls(
            version=v.whole("version"),
            head=v.word("head"),
            id=id,
            history=v.word("history"),
            run_id=v.word("run_id"),
            names=_names(v, shards),
            clock=counts,
            members=members,
            units=units,
            last_entry=log[0][0] if log else "0-0",
            begin=Begin(
                v.whole("from_version", default=0),
                v.word("from_head", default=first_head(id)),
                v.whole("from_contributions", default=0),
            ),
            moved=v.whole("moved", default=0),
            run=RunControl.of(v),
            lr=set_lr(v),
            states=states or {},
        )

    def _repr_html_(self) -> str:
        return workers_table(self)

    @property
    def units_done(self) -> int:
        """How many units of data are committed."""
        return int(self.units.get("done", 0))

    @property
    def active(self) -> int:
        """How many workers are in the vector clock."""
        return sum(m.active for m in self.members.values())

    @property
    def settled(self) -> bool:
        """Whether no worker is in the job, and everything that was pushed is committed."""
        return all(m.state == "gone" for m in self.members.values())

    @property
    def on_leave(self) -> set[str]:
        """The workers that have left only because the job is suspended: they keep their places."""
        if self.run.state != "suspended":
            return set()
        return {m.worker for m in self.members.values() if m.process["state"] == "left" and not m.finished}

    def learning_rate(self, config: JobConfig) -> float:
        """Return the learning rate of the next version, of parameters in no group."""
        optimizer = config.optimizer
        return optimizer.lr_of(optimizer, config.progress(self.version, sum(self.clock.values())), self.lr)

    def finished(self, config: JobConfig) -> bool:
        """Return whether all work is done and no contribution waits.

        A job with units is done when all are committed, any other when `workers` workers have done all their rounds,
        and one that was stopped when its workers have ended, and its last round is made.
        """
        if not self.settled:
            return False
        if self.run.state == "stopped":
            return not config.rounds_are_versions or self.run.is_last(self.version)
        if config.units:
            return self.units_done == config.units
        return sum(m.finished for m in self.members.values()) >= config.workers


AnyState = RoundState | State  # each names one version


@dataclass(frozen=True)
class Commit:
    """A commit in the log: `plan` made `version`, and `shards` has "<term> <digest of the weights>" for each shard."""

    version: int
    head: str
    plan: Plan
    shards: tuple[str, ...]
    plan_text: str
    noted: Sequence[Mapping[str, str]] = ()  # the other entries since the commit before it, if they were read too

    @classmethod
    def of(cls, fields: Mapping[str, str]) -> Commit:
        """Parse the fields of a log entry. Raises CorruptData if they are not the fields of a commit."""
        f = Fields(fields, "it")
        try:
            text, shards = f.text("plan", _MOST_PLAN), tuple(f.text("shards", _MOST_PLAN).split(","))
            return cls(f.whole("version"), f.word("head"), Plan.from_json(text), shards, text)
        except CorruptData as error:
            raise CorruptData(f"commit {fields.get('version')} cannot be read from its log entry: {error}") from None

    def follows(self, head: str) -> bool:
        """Return whether this entry continues the chain whose head is `head`."""
        return self.head == chained(head, self.plan_text, self.shards) and self.plan.head == head


def _names(version: Fields, shards: int, what: str = "shard") -> tuple[str, ...]:
    return tuple(version.matching(f"{what}:{i}", *STAGED_NAME) for i in range(shards))


def first_head(id: str) -> str:
    """Return the head of a job's version 0."""
    return _sha1(id)


def chained(head: str, plan_text: str, shards: tuple[str, ...]) -> str:
    """Return the head after a commit: sha1 of the head before, the plan and the shards, letter by letter as logged."""
    return _sha1(f"{head}\n{plan_text}\n{','.join(shards)}")


def _sha1(text: str) -> str:
    # SHA-1 is the only digest that Lua in Redis offers. It protects the chain against accidents; it signs nothing.
    return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
