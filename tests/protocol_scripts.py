"""What is in Redis, and each Lua script as one method: the same checks in the same order, the same answers.

The half of the protocol's model that must follow `kvps/lua`; `protocol_model` has the processes around it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvps.clocks import ASP

ACTIVE, DRAINING, GONE = "active", "draining", "gone"
AGGREGATORS = (0, 1)

MUTANTS = {
    "push-repeat": "push: a repeat is not given the first answer",
    "push-sequence": "push: sequence numbers are not compared at all",
    "push-incarnation": "push: any incarnation may push",
    "push-state": "push: who was evicted may push",
    "push-full": "push: as many may wait as like",
    "join-own": "join: admits at the others' round though this worker was further",
    "join-others": "join: admits at the worker's own round, whatever the others did meanwhile",
    "join-plan": "join: does not count the rounds that the open plan will end",
    "join-pending": "join: forgets what the last incarnation has waiting",
    "join-waits": "join: admits past rounds that the last incarnation still has waiting",
    "leave-incarnation": "leave: any incarnation may leave for the present one",
    "leave-drains": "leave: gone at once, though contributions wait",
    "evict-drains": "evict: gone at once, though contributions wait",
    "evict-keeps": "evict: drops accepted contributions that are in no plan",
    "plan-open": "plan: replaces a plan that is open",
    "plan-early": "plan: does not wait until all workers have joined once",
    "plan-due": "plan: BSP takes whatever round is there",
    "plan-waits": "plan: BSP does not wait for all active workers",
    "ready-already": "ready: does not say that the version is past",
    "ready-term": "ready: any term may say ready",
    "ready-plan": "ready: for whichever plan is open",
    "ready-digest": "ready: one term may say two things",
    "ready-all": "ready: the first shard flips all",
    "ready-recheck": "ready: believes the word of a holder who was replaced since",
    "ready-gone": "ready: who has drained does not become gone",
    "reject-term": "reject: any term may reject",
    "reject-plan": "reject: from whichever plan is open",
    "reject-member": "reject: also what is not in the plan any more",
    "reject-clears": "reject: shards that were ready stay ready",
    "reject-skip": "reject: the round still has to be done",
    "reject-waits": "reject: the round is over at once, not when the version without it is committed",
    "acquire-clears": "acquire: what the last holder said stays said",
    "holder-restages": "holder: stages another plan of one version under the same term",
    "holder-retakes": "holder: takes a new term without a look whether another committed meanwhile",
    "holder-stale": "holder: goes on from old weights when another has committed",
    "session-bound": "session: does not wait for the others' rounds",
}


class Contribution(NamedTuple):
    worker: int
    incarnation: int
    seq: int
    round: int


class Plan(NamedTuple):
    """`over` are the workers of rejected contributions, whose round ends with this version all the same."""

    id: int
    version: int
    contributions: tuple[Contribution, ...]
    over: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"plan {self.id} [{', '.join(f'w{c.worker}:{c.round}' for c in self.contributions)}]"


class Entry(NamedTuple):
    """A worker in the workers hash. `round` is that of its last accepted contribution."""

    incarnation: int
    state: str
    accepted: int
    pending: int
    skip: int
    round: int
    finished: bool


class Session(NamedTuple):
    """A worker's process: it will pull, push, or ask whether a push had been accepted before its link was cut."""

    incarnation: int
    seq: int
    round: int
    does: str = "pull"


class Holder(NamedTuple):
    """A shard in an aggregator's hands, which may have lost it. `weights` are the ids of the plans applied to them.

    It will look, retake the shard for `plan` since it has staged that version for another, say ready for what is
    staged, or reject `bad` from `plan`.
    """

    term: int
    weights: tuple[int, ...]
    staged: Plan | None = None
    does: str = "look"
    plan: Plan | None = None
    bad: Contribution | None = None


class Staged(NamedTuple):
    """Bytes: shard, version and term are their name, `weights` is what they are."""

    shard: int
    version: int
    term: int
    weights: tuple[int, ...]


class Faults(NamedTuple):
    """How many of each may still happen. `bad` is not a fault of the protocol, but not its choice either."""

    kills: int = 1
    evictions: int = 1
    takeovers: int = 1
    lost: int = 1
    late: int = 0
    bad: int = 1


NO_FAULTS = Faults(0, 0, 0, 0, 0, 0)


class State(NamedTuple):
    """What is in Redis; then the processes; then what only the judge remembers."""

    log: tuple[Plan, ...]
    clock: tuple[int, ...]
    entries: tuple[Entry | None, ...]
    inbox: tuple[Contribution, ...]
    plan: Plan | None
    plan_id: int
    ready: tuple[tuple[int, tuple[int, ...]] | None, ...]
    leases: tuple[int, ...]
    terms: tuple[int, ...]
    names: tuple[int, ...]  # the term in each shard's visible name; the version in it is the job's
    bytes: frozenset[Staged]

    sessions: tuple[Session | None, ...]
    zombie: tuple[int, Session] | None  # a process whose worker id is another's by now
    holders: tuple[tuple[Holder | None, ...], ...]
    late: Staged | None  # a copy of a write, on its way on a connection that was given up
    faults: Faults

    accepted: frozenset[Contribution]
    rejected: frozenset[Contribution]
    wrong: str

    @property
    def version(self) -> int:
        return len(self.log)

    def spending(self, fault: str) -> State | None:
        """The state after one fault more, unless all have happened."""
        left = getattr(self.faults, fault)
        return self._replace(faults=self.faults._replace(**{fault: left - 1})) if left else None

    def stored(self, new: Staged) -> State:
        return self._replace(bytes=frozenset(b for b in self.bytes if b[:3] != new[:3]) | {new})

    def entered(self, worker: int, entry: Entry) -> State:
        return self._replace(entries=put(self.entries, worker, entry))


class Step(NamedTuple):
    """What may happen next. `sure` is false for faults and for who comes back though nobody needs it."""

    label: str
    state: State
    sure: bool = True


Outcome = tuple[tuple[Any, ...], State]


def put(items: tuple[Any, ...], index: int, value: Any) -> tuple[Any, ...]:
    return (*items[:index], value, *items[index + 1 :])


def entry_of(s: State, worker: int) -> Entry:
    entry = s.entries[worker]
    assert entry, f"w{worker} has never joined"
    return entry


def one_less(entry: Entry, skip: int = 0) -> Entry:
    """The worker with one contribution less that waits."""
    drained = entry.state == DRAINING and entry.pending == 1
    return entry._replace(pending=entry.pending - 1, skip=entry.skip + skip, state=GONE if drained else entry.state)


@dataclass(frozen=True)
class Scripts:
    """The Lua scripts: each takes the state, and returns its answer and the state it leaves."""

    staleness: int
    max_pending: int
    without: frozenset[str]

    def has(self, check: str) -> bool:
        return check not in self.without

    def join(self, s: State, worker: int) -> Outcome:
        """Whether the one there lives (ALIVE) is a matter of time, and left to `Model`."""
        entry, clock = s.entries[worker], s.clock[worker]
        planned: Counter[int] = Counter()
        if s.plan and self.has("join-plan"):
            planned.update([*(c.worker for c in s.plan.contributions), *s.plan.over])
        rounds = {w: s.clock[w] + e.skip + planned[w] for w, e in enumerate(s.entries) if e}
        most = max(rounds.values(), default=0)
        least = min((r for w, r in rounds.items() if w != worker and entry_of(s, w).state != GONE), default=most)
        pending = entry.pending if entry and self.has("join-pending") else 0
        own = clock + entry.skip + pending if entry else 0
        due = 0 if self.staleness == ASP else least - self.staleness
        round_ = max(own if self.has("join-own") else 0, due if self.has("join-others") else 0)
        if pending and self.has("join-waits"):
            round_ = own  # a skip would count as committed before what waits is
        life = entry.incarnation + 1 if entry else 1
        fresh = Entry(life, ACTIVE, 0, pending, round_ - clock - pending, 0, False)
        return ("OK", life, round_), s.entered(worker, fresh)

    def push(self, s: State, worker: int, incarnation: int, seq: int, ask: bool = False) -> Outcome:
        entry = entry_of(s, worker)
        if entry.incarnation != incarnation and self.has("push-incarnation"):
            return ("EVICTED",), s
        if seq == entry.accepted and self.has("push-repeat") and self.has("push-sequence"):
            return ("ACK", entry.round), s
        if entry.state != ACTIVE and self.has("push-state"):
            return ("EVICTED",), s
        if ask:
            return ("NEW",), s
        if seq != entry.accepted + 1 and self.has("push-sequence"):
            return ("SEQUENCE",), s
        if entry.pending >= self.max_pending and self.has("push-full"):
            return ("FULL",), s
        entry = entry._replace(accepted=seq, pending=entry.pending + 1)
        entry = entry._replace(round=s.clock[worker] + entry.pending + entry.skip)
        c = Contribution(worker, entry.incarnation, seq, entry.round)
        s = s.entered(worker, entry)._replace(accepted=s.accepted | {c})
        return ("ACK", entry.round), s._replace(inbox=tuple(sorted((*s.inbox, c))))  # a plan sorts them so anyway

    def leave(self, s: State, worker: int, incarnation: int) -> Outcome:
        entry = entry_of(s, worker)
        if entry.incarnation != incarnation and self.has("leave-incarnation"):
            return ("EVICTED",), s
        if entry.state != ACTIVE:
            return ("OK",), s
        state = DRAINING if entry.pending and self.has("leave-drains") else GONE
        return ("OK",), s.entered(worker, entry._replace(state=state, finished=True))

    def evict(self, s: State, worker: int) -> Outcome:
        """Takes one active worker out; that it was silent is chance."""
        entry = entry_of(s, worker)
        if not self.has("evict-keeps"):
            planned = s.plan.contributions if s.plan else ()
            s = s._replace(inbox=tuple(c for c in s.inbox if c.worker != worker or c in planned))
            entry = entry._replace(pending=sum(c.worker == worker for c in s.inbox))
        state = DRAINING if entry.pending and self.has("evict-drains") else GONE
        return ("OK",), s.entered(worker, entry._replace(state=state))

    def plan(self, s: State) -> Outcome:
        if s.plan and self.has("plan-open"):
            return ("OPEN",), s
        if None in s.entries and self.has("plan-early"):
            return ("EARLY",), s
        loose = self.staleness != 0 or not self.has("plan-due")
        chosen = tuple(c for c in s.inbox if loose or c.round == s.version + 1)
        if not chosen:
            return ("IDLE",), s
        there = {c.worker for c in chosen}
        absent = any(e and e.state == ACTIVE and w not in there for w, e in enumerate(s.entries))
        if self.staleness == 0 and absent and self.has("plan-waits"):
            return ("IDLE",), s
        opened = Plan(s.plan_id + 1, s.version + 1, chosen)
        return ("OPEN",), s._replace(plan_id=opened.id, plan=opened)

    def ready(self, s: State, shard: int, term: int, plan: Plan, digest: tuple[int, ...]) -> Outcome:
        if s.version >= plan.version and self.has("ready-already"):
            return ("ALREADY",), s
        if s.terms[shard] != term and self.has("ready-term"):
            return ("TERM",), s
        if s.plan is None:
            return ("NOPLAN",), s
        if s.plan[:2] != plan[:2] and self.has("ready-plan"):
            return ("PLAN",), s
        mine, before = (term, digest), s.ready[shard]
        if before and before != mine and self.has("ready-digest"):
            return ("DIGEST",), s
        s = s._replace(ready=put(s.ready, shard, mine))
        believed = [said and (said[0] == s.terms[i] or not self.has("ready-recheck")) for i, said in enumerate(s.ready)]
        if not all(believed) and self.has("ready-all"):
            return ("READY",), s
        assert s.plan
        decided, entries, clock = s.plan, list(s.entries), list(s.clock)
        for worker, skip in [*((c.worker, 0) for c in decided.contributions), *((w, 1) for w in decided.over)]:
            entry = entry_of(s._replace(entries=tuple(entries)), worker)
            less = one_less(entry, skip if self.has("reject-skip") else 0)
            entries[worker] = less if self.has("ready-gone") else less._replace(state=entry.state)
            clock[worker] += not skip
        flipped = s._replace(
            log=(*s.log, decided),
            clock=tuple(clock),
            entries=tuple(entries),
            inbox=tuple(c for c in s.inbox if c not in decided.contributions),
            plan=None,
            ready=(None,) * len(s.ready),
            names=tuple(said[0] if said else 0 for said in s.ready),
            bytes=frozenset(b for b in s.bytes if b.version > s.version),  # nothing looks at older ones
        )
        return ("FLIPPED",), flipped

    def reject(self, s: State, shard: int, term: int, plan: Plan, out: Contribution) -> Outcome:
        if s.terms[shard] != term and self.has("reject-term"):
            return ("TERM",), s
        if s.plan is None or (s.plan.id != plan.id and self.has("reject-plan")):
            return ("PLAN",), s
        if out not in s.plan.contributions and self.has("reject-member"):
            return ("PLAN",), s
        over = s.plan.over
        if self.has("reject-waits"):
            over = (*over, out.worker)
        else:
            s = s.entered(out.worker, one_less(entry_of(s, out.worker), int(self.has("reject-skip"))))
        assert s.plan
        rest = tuple(c for c in s.plan.contributions if c != out)
        s = s._replace(
            plan_id=s.plan_id + 1,
            plan=Plan(s.plan_id + 1, s.plan.version, rest, over),
            ready=(None,) * len(s.ready) if self.has("reject-clears") else s.ready,
            inbox=tuple(c for c in s.inbox if c != out),
            rejected=s.rejected | {out},
        )
        return ("OK",), s

    def acquire(self, s: State, shard: int, aggregator: int, expired: bool) -> Outcome:
        """`expired` says that the holder let its lease run out. The new one sweeps what others staged."""
        if s.leases[shard] != aggregator and not expired:
            return ("HELD",), s
        term = s.terms[shard] + 1
        s = s._replace(
            leases=put(s.leases, shard, aggregator),
            terms=put(s.terms, shard, term),
            ready=put(s.ready, shard, None) if self.has("acquire-clears") else s.ready,
            bytes=frozenset(b for b in s.bytes if b.shard != shard or b.version <= s.version),
        )
        return ("OK", term), s
