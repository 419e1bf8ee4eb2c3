"""What is in Redis of a published job, and each Lua script as one method; what a publisher and a watcher know.

The half of the model of publishing that must follow `kvps/protocol/lua`; `publishing_model` has the processes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

MUTANTS = {
    "publish-restart": "publish: also after a restart of the server",
    "publish-history": "publish: also for who has loaded in an earlier history",
    "publish-term": "publish: any term of shard 0 may open a plan",
    "publish-version": "publish: whatever version is committed",
    "publish-head": "publish: whatever the version before was",
    "publish-kept": "publish: answers with the plan that another term has open",
    "publish-clears": "publish: shards that were ready for the plan before stay ready",
    "publish-repeat": "publish: a repeat opens another plan",
    "ready-restart": "ready: also after a restart of the server",
    "ready-history": "ready: also for a plan of an earlier history",
    "ready-already": "ready: does not say first that the version is past",
    "ready-term": "ready: any term may say ready",
    "ready-plan": "ready: for whichever plan is open",
    "ready-head": "ready: whatever the version before was",
    "ready-digest": "ready: one term may say two things",
    "acquire-clears": "acquire: what the last holder said stays said",
    "free-owner": "free: any term may delete",
    "free-restart": "free: also after a restart of the server",
    "recover-terms": "recover: the terms go on",
    "recover-ready": "recover: shards that were ready stay ready",
    "take-first": "publisher: takes a new term of shard 0 alone, and goes on with its old ones of the others",
    "load-early": "publisher: loads before it has the terms of all shards",
    "load-kept": "publisher: after a restart, takes the difference to what it has, as if nothing was lost",
    "base-published": "publisher: takes the difference to what it has published last, not to what it has loaded",
    "restages": "publisher: stages the next call's content under the names of one that has failed",
    "already-mine": "publisher: takes a version that is past for its own",
    "ready-ends": "publisher: takes it for a commit that it has said ready for all shards",
    "retry-blind": "publisher: does not look under new terms whether it has committed under the old ones",
    "watch-term": "watcher: follows from one version to the next whatever their terms are",
    "watch-twice": "watcher: goes on from the names that it had though a read was cut",
}
GARBAGE = -1
IDLE, TAKE, LOAD, STAGE, PUBLISH, READY = "idle", "take", "load", "stage", "publish", "ready"


class Entry(NamedTuple):
    """A committed version, whole also as its head. `call` is what its plan notes, `contents` what its shards are."""

    version: int
    call: int
    contents: tuple[int, ...]
    terms: tuple[int, ...]
    history: int
    plan: int


class Plan(NamedTuple):
    id: int
    version: int
    term: int
    call: int


class Staged(NamedTuple):
    """Bytes under the name of a shard, version and term: a content, and beside it the difference from `base` to it."""

    shard: int
    version: int
    term: int
    content: int
    base: int


class Call(NamedTuple):
    """A call of `publish` (then `shard` is 0 and `plan` is not known) or of `ready`."""

    script: str
    shard: int
    term: int
    version: int
    head: Entry
    history: int
    content: int
    plan: int = 0


class Publisher(NamedTuple):
    """What a publisher's process knows. `done` is how many shards it has taken, staged or said ready.

    `used` is whether it has staged something under the next version's names; `unsure` are the version and terms of an
    earlier try of this call, which may have committed it. `last` is what it has published last, if a mutant asks.
    """

    terms: tuple[int, ...]
    does: str = IDLE
    content: int = 0
    loaded: Entry | None = None
    base: tuple[int, ...] = ()
    history: int = 0
    done: int = 0
    plan: int = 0
    used: bool = False
    unsure: tuple[int, tuple[int, ...]] | None = None
    last: int = 0


class Watcher(NamedTuple):
    """What a watcher has: contents, and the version and terms that it knows them by. It is reading `target`, by the
    differences of `links` or whole, and has read `done` shards."""

    contents: tuple[int, ...]
    known: tuple[int, tuple[int, ...]] | None
    target: Entry | None = None
    links: tuple[tuple[int, tuple[int, ...]], ...] = ()
    done: int = 0


class Faults(NamedTuple):
    """How many of each may still happen. `fails` are calls that end in the middle in an error, `late` are calls that
    land twice, `losses` are new lives of the server without its last writes, `sweeps` are no fault."""

    takeovers: int = 0
    lost: int = 0
    late: int = 0
    kills: int = 0
    fails: int = 0
    losses: int = 0
    sweeps: int = 0
    cuts: int = 0


NO_FAULTS = Faults()


class State(NamedTuple):
    """What is in Redis; then the server, the processes, and what the judge remembers."""

    log: tuple[Entry, ...]
    plan: Plan | None
    plan_id: int
    ready: tuple[tuple[int, int] | None, ...]
    leases: tuple[int | None, ...]
    terms: tuple[int, ...]
    owners: tuple[int, ...]
    bytes: frozenset[Staged]
    history: int

    life: int
    disk: tuple[Any, ...] | None
    publishers: tuple[Publisher, ...]
    watcher: Watcher | None
    late: Call | None
    calls: int  # how many have begun
    told: frozenset[tuple[int, int]]  # contents whose callers were told their version
    faults: Faults
    wrong: str = ""

    @property
    def head(self) -> Entry:
        return self.log[-1]

    @property
    def version(self) -> int:
        return self.head.version

    def spending(self, fault: str) -> State | None:
        left = getattr(self.faults, fault)
        return self._replace(faults=self.faults._replace(**{fault: left - 1})) if left else None

    def having(self, a: int, publisher: Publisher) -> State:
        return self._replace(publishers=put(self.publishers, a, publisher))

    def found(self, shard: int, version: int, term: int) -> Staged | None:
        return next((b for b in self.bytes if b[:3] == (shard, version, term)), None)

    def stored(self, new: Staged) -> State:
        old = self.found(*new[:3])
        noted = self.ready[new.shard] if self.plan and self.plan.version == new.version else None
        told = any(e.version == new.version and e.terms[new.shard] == new.term for e in self.log)
        told = told or (noted is not None and noted[0] == new.term)
        wrong = "bytes are changed under a name that somebody was told" if told and old != new else ""
        return self._replace(bytes=self.bytes - {old} | {new}, wrong=wrong)

    def reborn(self) -> State:
        """The server is started again with what is on the disk; who was told of a version that is lost has lost it."""
        assert self.disk
        t = State(*self.disk, *self[KEPT:])._replace(life=self.life + 1, disk=None, late=None)
        return t._replace(told=frozenset(each for each in self.told if each in {(e.call, e.version) for e in t.log}))


KEPT = State._fields.index("life")


class Step(NamedTuple):
    """What may happen next. `sure` is false for faults, and for what nobody needs."""

    label: str
    state: State
    sure: bool = True


def put(items: tuple[Any, ...], index: int, value: Any) -> tuple[Any, ...]:
    return (*items[:index], value, *items[index + 1 :])


@dataclass(frozen=True)
class Scripts:
    """The Lua scripts: each takes the state, and returns its answer and the state it leaves."""

    without: frozenset[str]

    def has(self, check: str) -> bool:
        return check not in self.without

    def acquire(self, s: State, shard: int, a: int) -> State:
        """Whoever holds the lease, it has expired."""
        term = max(s.terms[shard], 10 * s.life) + 1  # terms have a nonce: one that was lost never comes again
        return s._replace(
            leases=put(s.leases, shard, a),
            terms=put(s.terms, shard, term),
            owners=put(s.owners, shard, term),
            ready=put(s.ready, shard, None) if self.has("acquire-clears") else s.ready,
        )

    def publish(self, s: State, c: Call) -> tuple[str, int, State]:
        if s.history != s.life and self.has("publish-restart"):
            return "RESTARTED", 0, s
        if c.history != s.history and self.has("publish-history"):
            return "HISTORY", 0, s
        if c.term != s.terms[0] and self.has("publish-term"):
            return "TERM", 0, s
        if c.version != s.version + 1 and self.has("publish-version"):
            return "VERSION", 0, s
        if c.head != s.head and self.has("publish-head"):
            return "HEAD", 0, s
        open_ = s.plan if s.plan and s.plan.version == c.version else None
        if open_ and (self.has("publish-repeat") if open_.term == c.term else not self.has("publish-kept")):
            return "OK", open_.id, s
        ready = (None,) * len(s.ready) if self.has("publish-clears") else s.ready
        plan = Plan(s.plan_id + 1, c.version, c.term, c.content)
        return "OK", plan.id, s._replace(plan=plan, plan_id=plan.id, ready=ready)

    def ready(self, s: State, c: Call) -> tuple[str, int, State]:
        if s.history != s.life and self.has("ready-restart"):
            return "RESTARTED", 0, s
        if c.history != s.history and self.has("ready-history"):
            return "HISTORY", 0, s
        if s.version >= c.version and self.has("ready-already"):
            return "ALREADY", 0, s
        if c.term != s.terms[c.shard] and self.has("ready-term"):
            return "TERM", 0, s
        if not s.plan:
            return "NOPLAN", 0, s
        if (s.plan.id, s.plan.version) != (c.plan, c.version) and self.has("ready-plan"):
            return "PLAN", 0, s
        if (c.version, c.head) != (s.version + 1, s.head) and self.has("ready-head"):
            return "HEAD", 0, s
        mine, before = (c.term, c.content), s.ready[c.shard]
        if before and before != mine and self.has("ready-digest"):
            return "DIGEST", 0, s
        s = s._replace(ready=put(s.ready, c.shard, mine))
        notes = [note for note in s.ready if note]
        if len(notes) < len(s.ready) or not s.plan:
            return "READY", 0, s
        terms, contents = tuple(term for term, _ in notes), tuple(content for _, content in notes)
        entry = Entry(s.plan.version, s.plan.call, contents, terms, s.history, s.plan.id)
        wrong = "" if terms == s.terms else "a version is made of a term that was replaced"
        t = s._replace(log=(*s.log, entry), plan=None, ready=(None,) * len(s.ready), wrong=wrong)
        return "FLIPPED", 0, t

    def free(self, s: State, shard: int, p: Publisher, dead: set[Staged]) -> State:
        if s.owners[shard] != p.terms[shard] and self.has("free-owner"):
            return s
        if s.life != p.history and self.has("free-restart"):
            return s
        return s._replace(bytes=s.bytes - dead)

    def recover(self, s: State) -> State:
        """The open plan stays, as it does for aggregators."""
        none = (None,) * len(s.terms)
        terms = tuple(max(term, 10 * s.life) + 1 for term in s.terms)
        return s._replace(
            history=s.life,
            leases=none,
            ready=none if self.has("recover-ready") else s.ready,
            terms=terms if self.has("recover-terms") else s.terms,
        )
