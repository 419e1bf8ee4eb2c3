"""The records of the model of experience: what is in Redis, what processes know, and what the judge remembers."""

from __future__ import annotations

from typing import Any, NamedTuple

Id = tuple[int, int, int]  # actor, incarnation, number of the item
Name = tuple[int, int]  # of a version: its number, and the call that published it


class Item(NamedTuple):
    """An accepted item. `base` names the oldest version that it was generated on; `of` is the nonce of the process that
    made it, for the judge; `taken` says that the term that has claimed last has taken it."""

    actor: int
    inc: int
    seq: int
    base: Name
    prompt: int
    of: int
    taken: bool = False

    @property
    def id(self) -> Id:
        return self[:3]


class Made(NamedTuple):
    """An entry of the log: a version, and what it was trained on."""

    version: int
    call: int
    items: tuple[Item, ...]


class Fate(NamedTuple):
    """An entry of the log: items of one call that were dropped or rejected when a version was the present one."""

    kind: str
    version: int
    items: tuple[Item, ...]


class Plan(NamedTuple):
    version: int
    term: int
    call: int
    ids: tuple[Id, ...]


class Incarnation(NamedTuple):
    """An actor's present incarnation. `offered` and `last` are its highest numbers that had room, and were accepted."""

    number: int
    nonce: int
    last: int = 0
    offered: int = 0


class Taken(NamedTuple):
    """The last numbered call of a term, and what it took or kept."""

    term: int
    number: int
    ids: tuple[Id, ...]


class Call(NamedTuple):
    """A call of a script, with all that any of them is told."""

    script: str
    who: int
    inc: int = 0
    seq: int = 0
    prompt: int = 0
    base: Name = (0, 0)
    nonce: int = 0
    term: int = 0
    number: int = 0
    lots: int = 0
    least: int = 1
    ids: tuple[Id, ...] = ()
    back: bool = False
    silent: tuple[int, ...] = ()


class Actor(NamedTuple):
    """What an actor's process knows: its incarnation, the prompt it works at, and the version that it has loaded."""

    does: str
    nonce: int = 0
    inc: int = 0
    seq: int = 1
    prompt: int = 0
    base: Name = (0, 0)


class Learner(NamedTuple):
    """What a learner's process knows. `number` is of its next call of claim, take or settle; `ids` are those of the
    call that it makes now; `unsure` says that a settle has failed, so that some of what it holds may be gone."""

    does: str
    term: int = 0
    base: Name = (0, 0)
    number: int = 1
    held: tuple[Id, ...] = ()
    ids: tuple[Id, ...] = ()
    call: int = 0
    back: bool = False
    unsure: bool = False


class Faults(NamedTuple):
    """How many of each may still happen. `fails` are calls that a process gives up, not knowing whether they landed;
    `restarts` are of a server that loses nothing. After `lapses` a learner finds that its lease has expired, and that
    nobody has taken it. In `hasty` terms a learner goes on without a claim. `lags` are items generated on an older
    version than the newest one, `empties` versions trained on nothing, `halves` attempts at a part of a lot: these,
    quits, rejects, backs and sweeps are no faults."""

    takeovers: int = 0
    lost: int = 0
    late: int = 0
    kills: int = 0
    crashes: int = 0
    evictions: int = 0
    fails: int = 0
    restarts: int = 0
    lapses: int = 0
    hasty: int = 0
    losses: int = 0
    quits: int = 0
    rejects: int = 0
    backs: int = 0
    empties: int = 0
    halves: int = 0
    lags: int = 0
    sweeps: int = 0


NO_FAULTS = Faults()


class State(NamedTuple):
    """What is in Redis; then the server, the processes, and what the judge remembers."""

    log: tuple[Made | Fate, ...]
    plan: Plan | None
    lease: int | None
    term: int
    claimed: int  # the term that has claimed last: what is taken is its
    last: Taken
    incs: tuple[Incarnation | None, ...]
    entered: tuple[int, ...]
    offers: frozenset[Id]
    holds: frozenset[Id]  # prompt, actor, incarnation
    items: tuple[Item, ...]
    next: int  # the next prompt that was never handed out
    closed: frozenset[int]
    bytes: frozenset[tuple[Id, int]]  # an item's id, and the nonce of the process that stored it
    history: int

    life: int
    disk: tuple[Any, ...] | None
    learners: tuple[Learner, ...]
    actors: tuple[Actor, ...]
    late: Call | None
    calls: int  # of publish that have begun
    nonces: int  # of actors' processes
    told: frozenset[Id]  # items whose actors were told that they are accepted
    faults: Faults
    wrong: str = ""

    @property
    def versions(self) -> list[Name]:
        return [(entry.version, entry.call) for entry in self.log if isinstance(entry, Made)]

    @property
    def version(self) -> int:
        return self.versions[-1][0]

    def spending(self, fault: str) -> State | None:
        left = getattr(self.faults, fault)
        return self._replace(faults=self.faults._replace(**{fault: left - 1})) if left else None

    def present(self, c: Call) -> Incarnation | None:
        """The incarnation that calls, if it is its actor's present one."""
        inc = self.incs[c.who]
        return inc if inc and inc.number == c.inc else None

    def held(self, a: int, inc: int) -> int:
        """The prompt that an incarnation holds, or 0."""
        return next((h[0] for h in self.holds if h[1:] == (a, inc)), 0)

    def marked(self, ids: tuple[Id, ...], taken: bool) -> State:
        return self._replace(items=tuple(i._replace(taken=taken) if i.id in ids else i for i in self.items))

    def without(self, items: tuple[Item, ...], entry: Made | Fate | None) -> State:
        """Items have had the fate that an entry of the log names."""
        if isinstance(entry, Fate):
            entry = entry._replace(items=tuple(i._replace(taken=False) for i in entry.items))
        log = (*self.log, entry) if entry else self.log
        return self._replace(items=tuple(i for i in self.items if i not in items), log=log)

    def fates(self) -> list[Id]:
        return [item.id for entry in self.log for item in entry.items]

    def reborn(self, kept: tuple[Any, ...]) -> State:
        """The server is started again with what is on the disk; who was told of an item that is lost has lost it."""
        t = State(*kept, *self[KEPT:])._replace(life=self.life + 1, disk=None, late=None)
        known = {i.id for i in t.items} | set(t.fates())
        return t._replace(told=frozenset(each for each in self.told if each in known))


KEPT = State._fields.index("life")


def lots(items: tuple[Item, ...]) -> dict[int | Id, tuple[Item, ...]]:
    """The items of each lot, in the order of each lot's oldest item: all of a prompt, or one without a prompt."""
    found: dict[int | Id, tuple[Item, ...]] = {}
    for item in items:
        lot = item.prompt or item.id
        found[lot] = (*found.get(lot, ()), item)
    return found
