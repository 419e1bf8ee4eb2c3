"""What is in Redis, and each Lua script as one method: the same checks in the same order, the same answers.

The half of the protocol's model that must follow `kvps/protocol/lua`; `model` has the processes around it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

ACTIVE, DRAINING, GONE, REJOINING = "active", "draining", "gone", "rejoining"
FREE, TAKEN, PUSHED, DONE = "free", "taken", "pushed", "done"  # a unit of data; never handed out is free, too
AGGREGATORS = (0, 1)

MUTANTS = {
    "push-repeat": "push: a repeat is not given the first answer",
    "push-sequence": "push: sequence numbers are not compared at all",
    "push-incarnation": "push: any incarnation may push",
    "push-state": "push: who was evicted may push",
    "push-unit": "push: whatever unit the worker says it has used",
    "push-pushed": "push: the unit stays the worker's",
    "push-unit-twice": "push: also of a unit that another worker has pushed",
    "push-unit-base": "push: of a unit of a round, on whatever version",
    "push-unit-repeat": "push: a repeat of what another had pushed first is told that it counts",
    "push-restart": "push: also after a restart of the server",
    "push-history": "push: also what was computed in an earlier history",
    "push-base": "push: also what was computed on a version that is no more",
    "push-full": "push: as many may wait as like",
    "push-late": "push: late contributions, too, in a job that drops them",
    "push-late-plan": "push: also while the plan without it is open",
    "push-late-repeat": "push: a repeat of what was dropped is told that it counts",
    "push-late-first": "push: a repeat is told that it comes late, though it was accepted",
    "push-round": "push: with a quorum, does not skip the rounds that were made without this worker",
    "join-own": "join: admits at the others' round though this worker was further",
    "join-others": "join: admits at the worker's own round, whatever the others did meanwhile",
    "join-plan": "join: does not count the rounds that the open plan will end",
    "join-pending": "join: forgets what the last incarnation has waiting",
    "join-waits": "join: admits past rounds that the last incarnation still has waiting",
    "join-unit": "join: the last incarnation's unit is not given back",
    "join-fixed": "join: also one worker more than divide the data among themselves",
    "join-restart": "join: also after a restart of the server",
    "next-unit-restart": "take: also after a restart of the server",
    "next-unit-incarnation": "take: any incarnation may take for the present one",
    "next-unit-state": "take: who was evicted may take",
    "next-unit-same": "take: another unit for who has one already",
    "next-unit-ahead": "take: a unit of a round that is not open yet",
    "unit-shared": "leave, evict, reject: a unit is given back though a second worker computes it",
    "unit-pushed": "leave, evict: a unit is given back though a second worker has pushed it",
    "leave-incarnation": "leave: any incarnation may leave for the present one",
    "leave-unit": "leave: the unit is not given back",
    "leave-lost": "leave: does not ask whether the join was lost",
    "leave-restart": "leave: also after a restart of the server",
    "leave-drains": "leave: gone at once, though contributions wait",
    "evict-restart": "evict: also after a restart of the server",
    "evict-drains": "evict: gone at once, though contributions wait",
    "evict-unit": "evict: the unit is not given back",
    "evict-keeps": "evict: drops accepted contributions that are in no plan",
    "plan-restart": "plan: also after a restart of the server",
    "plan-open": "plan: replaces a plan that is open",
    "plan-early": "plan: does not wait until all workers have joined once",
    "plan-due": "plan: BSP takes whatever round is there",
    "plan-waits": "plan: BSP does not wait for all active workers",
    "plan-units": "plan: does not wait for all units of the round",
    "plan-order": "plan: takes the units of a round in the order of their workers",
    "plan-round": "plan: takes units of later rounds too",
    "plan-quorum": "plan: does not wait for the quorum",
    "plan-present": "plan: waits for the whole quorum, though there are fewer workers by now",
    "ready-restart": "ready: also after a restart of the server",
    "ready-history": "ready: also for a plan of an earlier history",
    "ready-already": "ready: does not say that the version is past",
    "ready-term": "ready: any term may say ready",
    "ready-plan": "ready: for whichever plan is open",
    "ready-head": "ready: whatever the version before was",
    "ready-digest": "ready: one term may say two things",
    "ready-all": "ready: the first shard flips all",
    "ready-gone": "ready: who has drained does not become gone",
    "ready-done": "ready: the units are not marked done",
    "ready-over": "ready: the units of what a version leaves out for good are given back",
    "ready-frees": "ready: the units of what was rejected are not given back",
    "reject-restart": "reject: also after a restart of the server",
    "reject-term": "reject: any term may reject",
    "reject-plan": "reject: from whichever plan is open",
    "reject-member": "reject: also what is not in the plan any more",
    "reject-clears": "reject: shards that were ready stay ready",
    "reject-skip": "reject: the round still has to be done",
    "reject-again": "reject: a unit that is to be computed again is not given back",
    "reject-closes": "reject: the plan stays open without a unit that is computed again",
    "reject-waits": "reject: the round is over at once, not when the version without it is committed",
    "stop-round": "stop: all end at what is committed, not at the last round that was accepted",
    "stop-restart": "stop: also after a restart of the server",
    "stop-id": "stop: also for who means an earlier job",
    "push-stop": "push: also of a round behind the last one",
    "push-stop-repeat": "push: a repeat is told that the job has stopped, though it was accepted",
    "next-unit-stop": "take: a unit of a round behind the last one",
    "push-state-lost": "push: a repeat drops the worker's state that came with the first call",
    "join-state-waits": "join: the committed state, though a newer one waits with its contribution",
    "join-state-rejected": "join: the state of what was rejected waits for the next incarnation's push",
    "ready-state-newest": "ready: the newest state of a worker, also that of a contribution that waits on",
    "ready-state-own": "ready: the states that came with what is committed, though earlier contributions wait on",
    "ready-state-kept": "ready: the states of what was committed stay in the way",
    "reject-state": "reject: the state of what was rejected counts, though its contribution does not",
    "reject-state-lost": "reject: the state of what was rejected does not come with the worker's next contribution",
    "reject-state-later": "reject: the state of a later contribution that is committed already waits on",
    "reject-state-earlier": "reject: the states of earlier contributions count for rounds that a rejection has ended",
    "plan-pause": "plan: also while the job is paused",
    "adopt-id": "adopt: also for who means an earlier job",
    "adopt-restart": "adopt: also after a restart of the server",
    "adopt-repeat": "adopt: a repeat is told that another has the job",
    "adopt-before": "adopt: also when another has taken the job meanwhile",
    "adopt-incarnation": "adopt: also a worker that has joined again meanwhile",
    "adopt-finished": "adopt: the others wait for who has finished, too",
    "adopt-unit": "adopt: the unit is not given back",
    "acquire-restart": "acquire: also after a restart of the server",
    "acquire-clears": "acquire: what the last holder said stays said",
    "free-owner": "free: any term may delete",
    "free-restart": "free: also after a restart of the server",
    "free-synced": "free: though a failover may bring back the version whose bytes these are",
    "stage-synced": "stage: goes on though a failover may lose the bytes",
    "own-synced": "own: goes on though a failover may bring back the owner before",
    "push-synced": "push: is acknowledged though a failover may lose it",
    "recover-whole": "recover: also before the server has written its file anew",
    "recover-keeps": "recover: the open plan is dropped, with what was rejected from it",
    "recover-plan": "recover: the open plan stays one of the earlier history",
    "recover-terms": "recover: the terms go on",
    "recover-workers": "recover: the incarnations go on",
    "recover-unit": "recover: units are not given back",
    "holder-restages": "holder: stages another plan of one version under the same term",
    "holder-retakes": "holder: takes a new term without a look whether another committed meanwhile",
    "holder-names": "holder: takes what it staged for committed when any of that version is",
    "holder-stale": "holder: goes on from old weights when another has committed",
    "join-id": "join: also for who means an earlier job of that name",
    "push-id": "push: also for who means an earlier job",
    "leave-id": "leave: also for who means an earlier job",
    "next-unit-id": "take: also for who means an earlier job",
    "evict-id": "evict: also for who means an earlier job",
    "plan-id": "plan: also for who means an earlier job",
    "ready-id": "ready: also for who means an earlier job",
    "reject-id": "reject: also for who means an earlier job",
    "acquire-id": "acquire: also for who means an earlier job",
    "recover-id": "recover: also for who means an earlier job",
    "remove-id": "remove: whichever job has the name",
    "remove-bytes": "remove: unlinks the bytes of all jobs that ever had the name",
    "forget-id": "forget: frees the name though another job that had it is being removed",
    "session-bound": "session: does not wait for the others' rounds",
    "session-own": "session: with a quorum, does not wait until its own last round is committed",
    "session-dropped": "session: with a quorum, does not wait for the version that came without it",
    "session-round": "session: with a quorum, does rounds of its own after the job's last one",
    "session-forgotten": "session: goes on though the server knows of less than it was told",
    "session-cached": "session: computes a unit on the weights that it has, whatever round the unit is of",
    "session-fork": "session: a fork of its process goes on with it too",
}


class Contribution(NamedTuple):
    """`base` is noted only where late ones are dropped, and where versions are made of rounds of units.

    `state` is what the worker's user kept then: the incarnation and number of the push that brought it. No script sees
    it unless it is new.
    """

    worker: int
    incarnation: int
    seq: int
    round: int
    unit: int | None
    base: int = 0
    state: tuple[int, int] = (0, 0)


class Plan(NamedTuple):
    """`over` are rejected contributions, whose rounds end with this version all the same; `head` is the plan before.

    Ids are counted in Redis, which may lose the count: with the life of the server in which it was made none is twice.
    """

    id: int
    version: int
    contributions: tuple[Contribution, ...]
    head: tuple[int, int]
    history: int
    life: int
    over: tuple[Contribution, ...] = ()

    @property
    def mark(self) -> tuple[int, int]:
        return self.life, self.id

    def __str__(self) -> str:
        return f"plan {self.id} [{', '.join(f'w{c.worker}:{c.round}' for c in self.contributions)}]"


class Entry(NamedTuple):
    """A worker in the workers hash. `round` is that of its last accepted contribution, `unit` what it computes, `late`
    the number of the contribution that was dropped last."""

    incarnation: int
    state: str
    accepted: int
    pending: int
    skip: int
    round: int
    finished: bool
    unit: int | None
    late: int = 0

    @property
    def counts(self) -> bool:
        return self.state in (ACTIVE, REJOINING)


class Noted(NamedTuple):
    """A state that waits with its worker's contribution of a round; or for it, if what brought it was rejected."""

    worker: int
    round: int
    state: tuple[int, int]


class Session(NamedTuple):
    """A worker's process: it will pull, push, or ask whether a push had been accepted before its link was cut.

    Where data is handed out it will take a unit before, or leave. `history` and version `base` are what it has pulled.
    `state` is what its user keeps.
    """

    incarnation: int
    seq: int
    round: int
    does: str = "pull"
    unit: int | None = None
    history: int = 0
    base: int = 0
    state: tuple[int, int] = (0, 0)


class Holder(NamedTuple):
    """A shard in an aggregator's hands, which may have lost it. `weights` are the marks of the plans applied to them.

    It will look, retake the shard for `plan` since it has staged that version for another, say ready for what is
    staged, or reject `bad` from `plan`. It read what is committed in `history`.
    """

    term: int
    weights: tuple[tuple[int, int], ...]
    history: int
    staged: Plan | None = None
    does: str = "look"
    plan: Plan | None = None
    bad: Contribution | None = None
    synced: int = -1  # the version that the replica of control was seen to have, while this holder had that version


class Staged(NamedTuple):
    """Bytes: shard, version, term and the job's id are their name, `weights` is what they are."""

    shard: int
    version: int
    term: int
    weights: tuple[tuple[int, int], ...]
    job: int = 1


class Stale(NamedTuple):
    """Processes that hold a job which was removed: its id, sessions and holders."""

    job: int
    sessions: tuple[Session | None, ...]
    holders: tuple[tuple[Holder | None, ...], ...]


class Remover(NamedTuple):
    """A process that removes the job of an id. It will remove control, unlink bytes, or free the name."""

    job: int
    does: str


class Adopter(NamedTuple):
    """A launcher that takes the place of one that it has found ended: `before`, with its workers' incarnations."""

    me: int
    before: int
    ended: tuple[tuple[int, int], ...]


class Faults(NamedTuple):
    """How many of each may still happen. `bad` is not a fault of the protocol, but not its choice either.

    `losses` are new lives of the server, each without its last writes; `removals` are processes that remove the job.
    `backups` are units that are handed out a second time, because they are late.
    `stops` and `pauses` are what somebody asks for. `adoptions` are launchers that end with all their workers.
    `failovers` are those of a cluster, where control and each shard's bytes are on servers of their own.
    """

    kills: int = 1
    evictions: int = 1
    takeovers: int = 1
    lost: int = 1
    late: int = 0
    bad: int = 1
    losses: int = 0
    removals: int = 0
    forks: int = 0
    failovers: int = 0
    backups: int = 0
    stops: int = 0
    pauses: int = 0
    adoptions: int = 0


NO_FAULTS = Faults(*(0,) * 14)
CONTROL = -1
RUNS, PAUSED, STOPPED = "runs", "paused", "stopped"


class State(NamedTuple):
    """What is in Redis, and what the judge remembers of it; then the server and the processes.

    A history is named by the life of the server in which it began.
    """

    log: tuple[Plan, ...]
    clock: tuple[int, ...]
    entries: tuple[Entry | None, ...]
    inbox: tuple[Contribution, ...]
    plan: Plan | None
    plan_id: int
    ready: tuple[tuple[int, tuple[tuple[int, int], ...]] | None, ...]
    leases: tuple[int | None, ...]
    terms: tuple[int, ...]
    owners: tuple[int, ...]
    names: tuple[int, ...]  # the term in each shard's visible name; the version in it is the job's
    bytes: frozenset[Staged]
    units: tuple[str, ...]
    history: int
    accepted: frozenset[Contribution]
    rejected: frozenset[Contribution]
    job: int  # its id; 0: there is none
    removed: int  # the id of one that is being removed; 0: the name is free
    run: tuple[str, int]  # whether it runs, is paused or is stopped, and then the last round
    states: tuple[tuple[int, int], ...]  # of each worker: its committed state
    noted: frozenset[Noted]  # states that wait
    launcher: int  # whose job it is

    life: int
    disk: tuple[Any, ...] | None  # all of the above as it was when something was written to the disk last
    torn: bool  # the server's file ends in half a transaction, which runs at the next start if another stands behind it
    sessions: tuple[Session | None, ...]
    zombie: tuple[int, Session] | None  # a process whose worker id is another's by now
    holders: tuple[tuple[Holder | None, ...], ...]
    late: Staged | None  # a copy of a write, on its way on a connection that was given up
    removers: tuple[Remover, ...]
    stale: Stale | None
    adopters: tuple[Adopter, ...]
    replica: tuple[int, Any] | None  # of control, or of a shard's server: it has only what was there then
    promised: frozenset[tuple[int, int, int]]  # contributions whose workers were told, where servers may fail over
    faults: Faults
    wrong: str

    @property
    def version(self) -> int:
        return len(self.log)

    @property
    def control(self) -> tuple[Any, ...]:
        """What scripts alone write."""
        return self._replace(bytes=frozenset())[:_KEPT]

    def spending(self, fault: str) -> State | None:
        """The state after one fault more, unless all have happened."""
        left = getattr(self.faults, fault)
        return self._replace(faults=self.faults._replace(**{fault: left - 1})) if left else None

    def empty(self) -> State:
        """Without the job: what it promised ends with it."""
        workers, shards = len(self.clock), len(self.terms)
        none = (None,) * shards
        return self._replace(
            log=(),
            clock=(0,) * workers,
            entries=(None,) * workers,
            inbox=(),
            plan=None,
            plan_id=0,
            ready=none,
            leases=none,
            terms=(0,) * shards,
            owners=(0,) * shards,
            names=(0,) * shards,
            units=(FREE,) * len(self.units),
            accepted=frozenset(),
            rejected=frozenset(),
            promised=frozenset(),
            job=0,
            run=(RUNS, 0),
            states=((0, 0),) * workers,
            noted=frozenset(),
            launcher=0,
        )

    @property
    def head(self) -> tuple[int, int]:
        return self.log[-1].mark if self.log else (0, 0)

    def next(self, number: int) -> int:
        """What has not been before: terms and incarnations carry a nonce, so that a lost one never comes again."""
        return max(number, 10 * self.life, 100 * (self.job - 1)) + 1

    def saved(self) -> State:
        """Writes up to here are on the disk."""
        return self._replace(disk=self[:_KEPT])

    def reborn(self) -> State:
        """The server is killed and started again: it has what is on the disk, and connections are cut."""
        assert self.disk
        return State(*self.disk, *self[_KEPT:])._replace(life=self.life + 1, disk=None, torn=True, late=None)

    def lagging(self, place: int) -> State:
        """The replica of a place has what is there now, and no more from here on."""
        mine = frozenset(b for b in self.bytes if b.shard == place)
        return self._replace(replica=(place, self[:_KEPT] if place == CONTROL else (mine, self.owners[place])))

    def synced(self, place: int) -> bool:
        """Whether the replica of a place has all that is there, as WAIT tells."""
        if not self.replica or self.replica[0] != place:
            return True
        return self.lagging(place).replica == self.replica

    def failed_over(self) -> State:
        """The replica takes the place of its master, and the connections to that are cut."""
        assert self.replica
        place, kept = self.replica
        if place == CONTROL:
            t = State(*kept, *self[_KEPT:])._replace(life=self.life + 1, bytes=self.bytes, owners=self.owners)
        else:
            found, owner = kept
            others = frozenset(b for b in self.bytes if b.shard != place)
            t = self._replace(bytes=others | found, owners=put(self.owners, place, owner))
        return t._replace(replica=None, late=None)

    def stored(self, new: Staged) -> State:
        return self._replace(bytes=frozenset(b for b in self.bytes if b[:3] != new[:3]) | {new})

    def entered(self, worker: int, entry: Entry) -> State:
        return self._replace(entries=put(self.entries, worker, entry))

    def united(self, unit: int | None, where: str) -> State:
        return self if unit is None else self._replace(units=put(self.units, unit, where))


_KEPT = State._fields.index("life")


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


def moved(noted: frozenset[Noted], worker: int, before: int, after: int) -> frozenset[Noted]:
    """The states with that of a worker's round moved to another round, unless that has one."""
    there = {n[:2] for n in noted}
    gone = {n for n in noted if n[:2] == (worker, before)} if before != after else set()
    return noted - gone | {n._replace(round=after) for n in gone if (worker, after) not in there}


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
    clustered: bool = False
    quorum: int = 0
    drops: bool = False
    units_per_round: int = 0
    states: bool = False
    fixed: int = 0

    def all_joined(self, s: State) -> bool:
        """Whether all workers have joined that a job waits for. If the data is divided among so many as are `fixed`,
        one more is none of them."""
        return sum(e is not None for e in s.entries) >= (self.fixed or len(s.entries))

    @property
    def in_step(self) -> bool:
        """Whether a version is one round of all workers."""
        return self.staleness == 0 and not self.quorum and not self.units_per_round

    @property
    def partial(self) -> bool:
        """Whether a version is one round of the job, which some workers may miss."""
        return self.staleness == 0 and self.quorum > 0

    def wanted(self, s: State) -> int:
        """How many contributions a version waits for, where there is a quorum."""
        active = sum(e is not None and e.counts for e in s.entries)
        return max(1, min(self.quorum, active if self.has("plan-present") else self.quorum))

    def round_of(self, unit: int) -> int:
        """The round of a unit, counted from 0: the version that it is computed on in BSP."""
        return unit // self.units_per_round

    def units_of(self, s: State, round_: int) -> range:
        """The units of a round. The last one may have fewer."""
        return range(len(s.units))[round_ * self.units_per_round : (round_ + 1) * self.units_per_round]

    def is_open(self, s: State, unit: int) -> bool:
        """Whether a unit may be handed out: its round is the next that will be committed, or one within the bound."""
        return not self.units_per_round or self.round_of(unit) <= s.version + self.staleness

    def fits_unit(self, unit: int, base: int) -> bool:
        """Whether a unit of a round may have been computed on a version."""
        return self.round_of(unit) - self.staleness <= base <= self.round_of(unit)

    def has(self, check: str) -> bool:
        return check not in self.without

    def last_round(self, s: State) -> int:
        """The round with which a job that is stopped now ends: nothing that was accepted is of a later one. In rounds
        of units it is a number of versions, whose units were handed out; the scripts also count a round of which all
        came back. In ASP there are no rounds, and everybody ends at once."""
        if self.staleness < 0:
            return 0
        if self.units_per_round:
            out = [self.round_of(unit) + 1 for unit, is_ in enumerate(s.units) if is_ != FREE]
            return max([s.version, *out]) if self.has("stop-round") else s.version
        rounds = [s.clock[w] + e.skip + e.pending * self.has("stop-round") for w, e in enumerate(s.entries) if e]
        if self.partial:  # what is in no plan yet goes into the version behind it
            planned = s.plan.contributions if s.plan else ()
            more = len(s.inbox) > len(planned)
            rounds.append(s.version + (bool(s.plan) + more) * self.has("stop-round"))
        return max([s.version * (self.staleness == 0), *rounds])

    @staticmethod
    def done(s: State, worker: int, entry: Entry) -> int:
        """The last round that was accepted from a worker, or that it skips."""
        return s.clock[worker] + entry.skip + entry.pending

    def is_last(self, s: State, round_: int) -> bool:
        """Whether a worker ends that has done this round."""
        return s.run[0] == STOPPED and round_ >= s.run[1]

    def is_behind_last(self, s: State, round_: int) -> bool:
        """Whether a contribution of this round would be behind the last one."""
        state, last = s.run
        if state != STOPPED or self.staleness < 0 or self.units_per_round:
            return False
        return round_ > last or (self.partial and s.version + bool(s.plan) >= last)

    def stop(self, s: State, job: int | None = None) -> Outcome:
        """Fixes the last round. A repeat changes nothing."""
        if self.another_job(s, job, "stop-id"):
            return ("NOJOB",), s
        if self.restarted(s, "stop-restart"):
            return ("RESTARTED",), s
        return ("OK",), s if s.run[0] == STOPPED else s._replace(run=(STOPPED, self.last_round(s)))

    def another_job(self, s: State, job: int | None, check: str) -> bool:
        """Whether the caller means an earlier job of this name. None is the present one."""
        return not s.job or (job not in (None, s.job) and self.has(check))

    def restarted(self, s: State, check: str) -> bool:
        return s.history != s.life and self.has(check)

    def drop_unit(self, s: State, worker: int, check: str) -> State:
        """The unit that was taken and not pushed goes to another, unless a second worker has pushed it."""
        entry = entry_of(s, worker)
        unit, s = entry.unit, s.entered(worker, entry._replace(unit=None))
        if unit is None or not self.has(check) or (s.units[unit] != TAKEN and self.has("unit-pushed")):
            return s
        return self.give_back(s, unit)

    def give_back(self, s: State, unit: int) -> State:
        """The unit is free, unless a second worker computes it."""
        shared = any(e and e.unit == unit for e in s.entries) and self.has("unit-shared")
        return s.united(unit, TAKEN if shared else FREE)

    def depart(self, s: State, worker: int, name: str) -> State:
        """Out of the vector clock; what waits still commits. `name` is that of the script."""
        entry = entry_of(s, worker)
        state = DRAINING if entry.pending and self.has(f"{name}-drains") else GONE
        return self.drop_unit(s.entered(worker, entry._replace(state=state)), worker, f"{name}-unit")

    def join(self, s: State, worker: int, job: int | None = None) -> Outcome:
        """Whether the one there lives (ALIVE) is a matter of time, and left to `Model`."""
        if self.another_job(s, job, "join-id"):
            return ("NOJOB",), s
        if self.restarted(s, "join-restart"):
            return ("RESTARTED",), s
        entry, clock = s.entries[worker], s.clock[worker]
        if self.fixed and not entry and self.all_joined(s) and self.has("join-fixed"):
            return ("COMPLETE",), s
        others = (s.clock[w] + e.skip for w, e in enumerate(s.entries) if e and w != worker and e.state != GONE)
        furthest = max((c.round for plan in s.log for c in (*plan.contributions, *plan.over)), default=0)
        pending = entry.pending if entry and self.has("join-pending") else 0
        own = clock + entry.skip + pending if entry else 0
        due = 0
        if self.units_per_round:
            due = 0  # rounds are the job's, and a worker counts its own contributions
        elif self.staleness == 0:
            due = s.version + bool(s.plan and self.has("join-plan"))
        elif self.staleness > 0:
            due = min(others, default=furthest) - self.staleness - 1
        round_ = max(own if self.has("join-own") else 0, due if self.has("join-others") else 0)
        if pending and self.has("join-waits"):
            round_ = own  # a skip would count as committed before what waits is
        life = s.next(entry.incarnation if entry else 0)
        fresh = Entry(life, ACTIVE, 0, pending, round_ - clock - pending, 0, False, None)
        if entry:
            s = self.drop_unit(s, worker, "join-unit")
        waiting = [n for n in s.noted if n.worker == worker and n.round <= own]
        newest = max(waiting).state if waiting and self.has("join-state-waits") else s.states[worker]
        if self.has("join-state-rejected"):
            s = s._replace(noted=frozenset(n for n in s.noted if n.worker != worker or n.round <= own))
        return ("OK", life, round_, newest), s.entered(worker, fresh)

    def take(self, s: State, worker: int, incarnation: int, job: int | None = None, late: bool = False) -> Outcome:
        """`late` says that a unit is out for so long that it is handed out a second time."""
        if self.another_job(s, job, "next-unit-id"):
            return ("NOJOB",), s
        if self.restarted(s, "next-unit-restart"):
            return ("RESTARTED",), s
        entry = s.entries[worker]
        if not entry or (entry.incarnation != incarnation and self.has("next-unit-incarnation")):
            return ("EVICTED",), s
        if entry.state != ACTIVE and self.has("next-unit-state"):
            return ("EVICTED",), s
        if entry.unit is not None and self.has("next-unit-same"):
            return ("OK", entry.unit), s
        free = [u for u, is_ in enumerate(s.units) if is_ == FREE]
        if s.run[0] == STOPPED and self.has("next-unit-stop"):
            if not self.units_per_round:
                ends = self.is_last(s, self.done(s, worker, entry))
            else:
                ends = self.is_last(s, s.version)
                free = [u for u in free if self.round_of(u) < s.run[1]]
            if ends:
                return ("DONE",), s
        if self.has("next-unit-ahead"):
            free = [u for u in free if self.is_open(s, u)]
        if not free and late:
            free = [u for u, is_ in enumerate(s.units) if is_ == TAKEN and self._has_one(s, u)]
        if not free:
            return ("DONE" if set(s.units) == {DONE} else "NONE",), s
        return ("OK", free[0]), s.united(free[0], TAKEN).entered(worker, entry._replace(unit=free[0]))

    @staticmethod
    def _has_one(s: State, unit: int) -> bool:
        """Whether just one worker computes a unit."""
        return sum(e is not None and e.unit == unit for e in s.entries) == 1

    def push(self, s: State, worker: int, session: Session, ask: bool = False, job: int | None = None) -> Outcome:
        if self.another_job(s, job, "push-id"):
            return ("NOJOB",), s
        entry, seq = s.entries[worker], session.seq + 1
        if not entry or (entry.incarnation != session.incarnation and self.has("push-incarnation")):
            return ("EVICTED",), s
        late = self.drops and (session.base < s.version or (s.plan is not None and self.has("push-late-plan")))
        if late and not ask and not self.has("push-late-first"):
            return ("LATE",), s
        round_ = self.done(s, worker, entry) + 1
        if self.is_behind_last(s, round_) and not ask and not self.has("push-stop-repeat"):
            return ("STOPPED",), s
        if seq == entry.accepted and self.has("push-repeat") and self.has("push-sequence"):
            if entry.late == seq and self.units_per_round and self.has("push-unit-repeat"):
                return ("DUPLICATE",), s
            if entry.late == seq and not self.units_per_round and self.has("push-late-repeat"):
                return ("LATE",), s
            if not self.has("push-state-lost"):
                s = s._replace(noted=frozenset(n for n in s.noted if n[:2] != (worker, entry.round)))
            return ("ACK", entry.round), s
        if entry.state != ACTIVE and self.has("push-state"):
            return ("EVICTED",), s
        if ask:
            return ("NEW",), s
        if seq != entry.accepted + 1 and self.has("push-sequence"):
            return ("SEQUENCE",), s
        if self.restarted(s, "push-restart"):
            return ("RESTARTED",), s
        if session.history != s.history and self.has("push-history"):
            return ("HISTORY",), s
        if session.base > s.version and self.has("push-base"):
            return ("BASE",), s
        if session.unit != entry.unit and self.has("push-unit"):
            return ("UNIT",), s
        if self.units_per_round and entry.unit is not None:
            if s.units[entry.unit] != TAKEN and self.has("push-unit-twice"):
                return ("DUPLICATE",), s.entered(worker, entry._replace(accepted=seq, late=seq, unit=None))
            if not self.fits_unit(entry.unit, session.base) and self.has("push-unit-base"):
                return ("BASE",), s
        if self.is_behind_last(s, round_) and self.has("push-stop"):
            return ("STOPPED",), s
        if late and self.has("push-late"):
            return ("LATE",), s.entered(worker, entry._replace(accepted=seq, late=seq))
        if entry.pending >= self.max_pending and self.has("push-full"):
            return ("FULL",), s
        if self.partial and not entry.pending and self.has("push-round"):
            missed = max(0, session.base - s.clock[worker] - entry.skip)
            s = s._replace(noted=moved(s.noted, worker, round_, round_ + missed))
            entry = entry._replace(skip=entry.skip + missed)
        unit, keeps = entry.unit, not self.has("push-pushed")
        entry = entry._replace(accepted=seq, pending=entry.pending + 1, unit=unit if keeps else None)
        entry = entry._replace(round=s.clock[worker] + entry.pending + entry.skip)
        base = session.base if self.drops or self.units_per_round else 0
        state = self.state_at(session)
        c = Contribution(worker, entry.incarnation, seq, entry.round, unit, base, state)
        s = s.entered(worker, entry).united(unit, PUSHED)._replace(accepted=s.accepted | {c})
        if state != session.state:
            others = frozenset(n for n in s.noted if n[:2] != (worker, entry.round))
            s = s._replace(noted=others | {Noted(worker, entry.round, state)})
        return ("ACK", entry.round), s._replace(inbox=tuple(sorted((*s.inbox, c))))  # a plan sorts them so anyway

    def state_at(self, session: Session) -> tuple[int, int]:
        """What the user of a session keeps at its next push: every second one brings another state."""
        seq = session.seq + 1
        return (session.incarnation, seq) if self.states and (session.incarnation + seq) % 2 == 0 else session.state

    def leave(self, s: State, worker: int, incarnation: int, finished: bool = True, job: int | None = None) -> Outcome:
        if self.another_job(s, job, "leave-id"):
            return ("NOJOB",), s
        entry = s.entries[worker]
        if (not entry or entry.incarnation < incarnation) and self.has("leave-lost"):
            return ("EVICTED",), s
        if not entry:
            return ("NOJOB",), s
        if entry.incarnation != incarnation and self.has("leave-incarnation"):
            return ("OK",), s  # replaced
        if entry.state == REJOINING:
            return ("EVICTED",), s
        if entry.state != ACTIVE:
            return ("OK" if entry.finished else "EVICTED",), s
        if self.restarted(s, "leave-restart"):
            return ("RESTARTED",), s
        return ("OK",), self.depart(s.entered(worker, entry._replace(finished=finished)), worker, "leave")

    def evict(self, s: State, worker: int, job: int | None = None) -> Outcome:
        """Takes one active worker out; that it was silent is chance."""
        if self.another_job(s, job, "evict-id"):
            return ("NOJOB",), s
        if self.restarted(s, "evict-restart"):
            return ("RESTARTED",), s
        if not self.has("evict-keeps"):
            planned = s.plan.contributions if s.plan else ()
            s = s._replace(inbox=tuple(c for c in s.inbox if c.worker != worker or c in planned))
            pending = sum(c.worker == worker for c in s.inbox)
            s = s.entered(worker, entry_of(s, worker)._replace(pending=pending))
        return ("OK",), self.depart(s, worker, "evict")

    def adopt(self, s: State, adopter: Adopter, job: int | None = None) -> Outcome:
        """Workers that ended with their launcher or before it keep their places."""
        if self.another_job(s, job, "adopt-id"):
            return ("NOJOB",), s
        if self.restarted(s, "adopt-restart"):
            return ("RESTARTED",), s
        if s.launcher == adopter.me and self.has("adopt-repeat"):
            return ("OK",), s
        if s.launcher != adopter.before and self.has("adopt-before"):
            return ("OTHER",), s
        s = s._replace(launcher=adopter.me)
        for worker, incarnation in adopter.ended:
            entry = s.entries[worker]
            if not entry or (entry.incarnation != incarnation and self.has("adopt-incarnation")):
                continue
            if not entry.finished or not self.has("adopt-finished"):
                s = self.drop_unit(s.entered(worker, entry._replace(state=REJOINING)), worker, "adopt-unit")
        return ("OK",), s

    def plan(self, s: State, job: int | None = None) -> Outcome:
        if self.another_job(s, job, "plan-id"):
            return ("NOJOB",), s
        if self.restarted(s, "plan-restart"):
            return ("RESTARTED",), s
        if s.plan and self.has("plan-open"):
            return ("OPEN",), s
        if s.run[0] == PAUSED and self.has("plan-pause"):
            return ("IDLE",), s
        if not self.all_joined(s) and s.run[0] != STOPPED and self.has("plan-early"):
            return ("EARLY",), s
        if self.quorum and len(s.inbox) < self.wanted(s) and self.has("plan-quorum"):
            return ("IDLE",), s  # once they are there, how long it waits for the others is chance
        if self.units_per_round:
            return self._plan_units(s)
        loose = not self.in_step or not self.has("plan-due")
        chosen = tuple(c for c in s.inbox if loose or c.round == s.version + 1)
        if not chosen:
            return ("IDLE",), s
        there = {c.worker for c in chosen}
        absent = any(e and e.counts and w not in there for w, e in enumerate(s.entries))
        if self.in_step and absent and self.has("plan-waits"):
            return ("IDLE",), s
        opened = Plan(s.plan_id + 1, s.version + 1, chosen, s.head, s.history, s.life)
        return ("OPEN",), s._replace(plan_id=opened.id, plan=opened)

    def _plan_units(self, s: State) -> Outcome:
        """A version is made of the units of its round, in their order."""
        units = self.units_of(s, s.version)
        chosen = [c for c in s.inbox if c.unit in units or not self.has("plan-round")]
        if not chosen or (len(chosen) < len(units) and self.has("plan-units")):
            return ("IDLE",), s
        if self.has("plan-order"):
            chosen.sort(key=lambda c: -1 if c.unit is None else c.unit)
        opened = Plan(s.plan_id + 1, s.version + 1, tuple(chosen), s.head, s.history, s.life)
        return ("OPEN",), s._replace(plan_id=opened.id, plan=opened)

    def ready(
        self, s: State, shard: int, term: int, plan: Plan, digest: tuple[tuple[int, int], ...], job: int | None = None
    ) -> Outcome:
        if self.another_job(s, job, "ready-id"):
            return ("NOJOB",), s
        if self.restarted(s, "ready-restart"):
            return ("RESTARTED",), s
        if plan.history != s.history and self.has("ready-history"):
            return ("HISTORY",), s
        if s.version >= plan.version and self.has("ready-already"):
            return ("ALREADY",), s
        if s.terms[shard] != term and self.has("ready-term"):
            return ("TERM",), s
        if s.plan is None:
            return ("NOPLAN",), s
        if s.plan[:2] != plan[:2] and self.has("ready-plan"):
            return ("PLAN",), s
        if not s.head == plan.head == s.plan.head and self.has("ready-head"):
            return ("HEAD",), s
        mine, before = (term, digest), s.ready[shard]
        if before and before != mine and self.has("ready-digest"):
            return ("DIGEST",), s
        s = s._replace(ready=put(s.ready, shard, mine))
        if not all(s.ready) and self.has("ready-all"):
            return ("READY",), s
        s = self._commit_states(s, s.plan)
        assert s.plan
        decided, clock = s.plan, list(s.clock)
        for c in (*decided.contributions, *decided.over):
            entry, over = entry_of(s, c.worker), c in decided.over
            less = one_less(entry, over and self.has("reject-skip"))
            s = s.entered(c.worker, less if self.has("ready-gone") else less._replace(state=entry.state))
            clock[c.worker] += not over
            if over and self.units_per_round:  # the version leaves it out for good, or it could never be made
                s = s.united(c.unit, DONE if self.has("ready-over") else FREE)
            elif self.has("ready-frees" if over else "ready-done"):
                s = s.united(c.unit, FREE if over else DONE)
        flipped = s._replace(
            log=(*s.log, decided),
            clock=tuple(clock),
            inbox=tuple(c for c in s.inbox if c not in decided.contributions),
            plan=None,
            ready=(None,) * len(s.ready),
            names=tuple(said[0] if said else 0 for said in s.ready),
            # Nothing looks at older ones, unless a failover brings back what named them.
            bytes=frozenset(b for b in s.bytes if b.version > s.version or b.job != s.job or self.clustered),
        )
        return ("FLIPPED",), flipped

    def _commit_states(self, s: State, plan: Plan) -> State:
        """Each worker's state becomes the one that it had with as many contributions as its clock counts: in rounds of
        units, a later contribution may be committed before an earlier one."""
        ended = dict[int, int]()
        for c in sorted(plan.over):
            s = self._pass_on(s, c, ended.get(c.worker, 0))
            ended[c.worker] = ended.get(c.worker, 0) + 1
        for worker in {c.worker for c in plan.contributions}:
            own = [c.round for c in plan.contributions if c.worker == worker]
            last = s.clock[worker] + entry_of(s, worker).skip + ended.get(worker, 0) + len(own)
            theirs = [
                n for n in s.noted if n.worker == worker and (n.round <= last or not self.has("ready-state-newest"))
            ]
            if not self.has("ready-state-own"):
                theirs = [n for n in s.noted if n.worker == worker and n.round in own]
            if theirs:
                s = s._replace(states=put(s.states, worker, max(theirs).state))
            if self.has("ready-state-kept"):
                s = s._replace(noted=s.noted - set(theirs))
        return s

    def _pass_on(self, s: State, out: Contribution, ended: int = 0) -> State:
        """The state of what was rejected comes with its worker's next contribution, unless that has one of its own.
        The round that ends is that of the earliest contribution that waits, so the states of those before the rejected
        one wait for a later round. `ended` is how many rounds of the worker have ended, and are not counted yet."""
        worker, noted = out.worker, s.noted
        done = s.clock[worker] + entry_of(s, worker).skip + ended
        if out.round <= done and self.has("reject-state-later"):  # a later one of the worker is committed already
            own = {n for n in noted if n[:2] == (worker, done + 1)}
            states = put(s.states, worker, max(own).state) if own else s.states
            return s._replace(noted=noted - own, states=states)
        if self.has("reject-state-lost"):
            noted = moved(noted, worker, out.round, out.round + 1) if self.has("reject-state") else noted
        else:
            noted = frozenset(n for n in noted if n[:2] != (worker, out.round))
        for earlier in range(out.round - 1, done, -1) if self.has("reject-state-earlier") else ():
            noted = moved(noted, worker, earlier, earlier + 1)
        return s._replace(noted=noted)

    def reject(
        self,
        s: State,
        shard: int,
        term: int,
        plan: Plan,
        out: Contribution,
        job: int | None = None,
        again: bool = False,
    ) -> Outcome:
        """`again` says that the unit is to be computed again: its bytes are damaged. Then its round is not whole."""
        if self.another_job(s, job, "reject-id"):
            return ("NOJOB",), s
        if self.restarted(s, "reject-restart"):
            return ("RESTARTED",), s
        if s.terms[shard] != term and self.has("reject-term"):
            return ("TERM",), s
        if s.plan is None or (s.plan.id != plan.id and self.has("reject-plan")):
            return ("PLAN",), s
        if out not in s.plan.contributions and self.has("reject-member"):
            return ("PLAN",), s
        again = again and self.units_per_round > 0
        over = s.plan.over
        if again:
            s = self._pass_on(s, out)
            s = s.entered(out.worker, one_less(entry_of(s, out.worker), skip=1))
            s = self.give_back(s, out.unit) if out.unit is not None and self.has("reject-again") else s
        elif self.has("reject-waits"):
            over = (*over, out)
        else:
            s = self._pass_on(s, out)
            s = s.entered(out.worker, one_less(entry_of(s, out.worker), self.has("reject-skip")))
        assert s.plan
        rest = tuple(c for c in s.plan.contributions if c != out)
        s = s._replace(
            plan_id=s.plan_id + 1,
            plan=s.plan._replace(id=s.plan_id + 1, contributions=rest, over=over, life=s.life),
            ready=(None,) * len(s.ready) if self.has("reject-clears") else s.ready,
            inbox=tuple(c for c in s.inbox if c != out),
            rejected=s.rejected | {out},
        )
        return ("OK",), s._replace(plan=None) if again and self.has("reject-closes") else s

    def acquire(self, s: State, shard: int, aggregator: int, expired: bool, job: int | None = None) -> Outcome:
        """`expired` says that the holder let its lease run out. The new one owns the slot, and sweeps it."""
        if self.another_job(s, job, "acquire-id"):
            return ("NOJOB",), s
        if self.restarted(s, "acquire-restart"):
            return ("RESTARTED",), s
        if s.leases[shard] not in (aggregator, None) and not expired:
            return ("HELD",), s
        term = s.next(s.terms[shard])
        s = s._replace(
            leases=put(s.leases, shard, aggregator),
            terms=put(s.terms, shard, term),
            owners=put(s.owners, shard, term),
            ready=put(s.ready, shard, None) if self.has("acquire-clears") else s.ready,
            bytes=frozenset(b for b in s.bytes if b.shard != shard or b.version <= s.version or b.job != s.job),
        )
        return ("OK", term), s

    def free(self, s: State, shard: int, holder: Holder) -> Outcome:
        """Deletes all that the caller does not know as its own."""
        if s.owners[shard] != holder.term and self.has("free-owner"):
            return ("LOST",), s
        if self.clustered:
            if holder.synced != len(holder.weights) and self.has("free-synced"):
                return ("BEHIND",), s
        elif holder.history != s.life and self.has("free-restart"):
            return ("RESTARTED",), s
        mine = (len(holder.weights), holder.weights), (len(holder.weights) + 1, holder.term)
        others = (b for b in s.bytes if b.shard != shard or b.job != s.job)
        keeps = (*others, *(b for b in s.bytes if (b.version, b.weights) in mine or b[1:3] in mine))
        return ("OK",), s._replace(bytes=frozenset(keeps))

    def recover(self, s: State, job: int | None = None) -> Outcome:
        """What goes on is `s.life`."""
        if self.another_job(s, job, "recover-id"):
            return ("NOJOB",), s
        if s.history == s.life:
            return ("OK",), s
        for worker, entry in enumerate(s.entries):
            if entry and entry.state == ACTIVE and self.has("recover-workers"):
                s = self.drop_unit(s.entered(worker, entry._replace(state=REJOINING)), worker, "recover-unit")
        s = s._replace(
            plan=s.plan and s.plan._replace(history=s.life if self.has("recover-plan") else s.plan.history)
            if self.has("recover-keeps")
            else None,
            ready=(None,) * len(s.ready),
            leases=(None,) * len(s.leases),
            terms=tuple(map(s.next, s.terms)) if self.has("recover-terms") else s.terms,
            history=s.life,
        )
        return ("OK",), s

    def remove(self, s: State, job: int) -> Outcome:
        """Forgets control; the name stays taken."""
        if not s.job or (s.job != job and self.has("remove-id")):
            return ("NOJOB",), s
        stale = Stale(s.job, s.sessions, s.holders)
        none = (None,) * len(s.terms)
        gone = s.empty()._replace(removed=s.job, stale=stale, zombie=None)
        gone = gone._replace(adopters=())
        return ("OK",), gone._replace(sessions=(None,) * len(s.sessions), holders=(none,) * len(s.holders))

    def forget(self, s: State, job: int) -> Outcome:
        if s.removed != job and self.has("forget-id"):
            return ("OTHER",), s
        return ("OK",), s._replace(removed=0)
