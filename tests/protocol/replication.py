"""What an acknowledgement with durability replicated rests on, as a model of its own, explored breadth first.

A master has replicas, each of which copies its log, one write after the other. Any replica may be promoted, also one
that is behind. The old master is not told at once: it goes on taking writes, replicas that have not been told yet go on
copying them, and clients may find it. Later each server is told, drops what the new master does not have, and copies
its log. `broken` is an acknowledged write that the newest master does not have.

`kvps.connection.replicas` has the rule that is called ALL here. Each other rule leaves something out of it.

Not here: replicas that are still copying for the first time, which no Sentinel and no cluster promotes while there is
another, and masters that come back without their last writes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

NOBODY = -1


class Link(NamedTuple):
    """A replica as its master sees it: how many writes it has confirmed on this link."""

    master: int
    replica: int
    confirmed: int


@dataclass(frozen=True)
class State:
    """Server 0 begins as the master.

    logs     the writes that each server has
    follows  each server's master; NOBODY of one that acts as a master
    newest   the server that was promoted last; `named` the one that the Sentinels name
    """

    logs: tuple[tuple[int, ...], ...]
    follows: tuple[int, ...]
    links: frozenset[Link]
    newest: int = 0
    named: int = 0
    written: int = 0
    acknowledged: frozenset[int] = frozenset()
    promotions: int = 0
    added: int = 0
    dead: frozenset[int] = frozenset()

    def but(self, **changes: object) -> State:
        return State(**{**self.__dict__, **changes})  # type: ignore[arg-type]

    @property
    def broken(self) -> bool:
        return not self.acknowledged <= set(self.logs[self.newest])


class Confirmed(NamedTuple):
    """What a master knows of a write: its replicas, and how many of them have confirmed it."""

    attached: int
    confirmed: int
    is_named: bool


Rule = Callable[[Confirmed, int], bool]
"""Whether a write is acknowledged, in a job that was created when the master had so many replicas."""

ALL: Rule = lambda seen, replicas: seen.confirmed >= replicas and seen.attached <= replicas  # noqa: E731
MUTANTS: dict[str, Rule] = {
    "one": lambda seen, replicas: seen.confirmed >= 1,
    "majority of the copies": lambda seen, replicas: 2 * (1 + seen.confirmed) > 1 + replicas,
    "all but one": lambda seen, replicas: seen.confirmed >= max(1, replicas - 1),
    "all that are attached": lambda seen, replicas: seen.attached > 0 and seen.confirmed == seen.attached,
    "one, and the Sentinels still name the master": lambda seen, replicas: seen.confirmed >= 1 and seen.is_named,
    "more may be attached": lambda seen, replicas: seen.confirmed >= replicas,
}


@dataclass(frozen=True)
class Model:
    """A job with durability replicated at small bounds.

    replicas    how many replicas the master has when the job is created
    planned     whether the old master lives on after a promotion
    added       how many further replicas may be attached while the job runs
    """

    replicas: int
    rule: Rule = ALL
    planned: bool = True
    added: int = 0
    writes: int = 2
    promotions: int = 2

    def start(self) -> State:
        followers = range(1, self.replicas + 1)
        logs = ((),) * (1 + self.replicas + self.added)
        follows = (NOBODY, *(0 for _ in followers), *(NOBODY,) * self.added)
        return State(logs, follows, frozenset(Link(0, replica, 0) for replica in followers))

    def steps(self, s: State) -> Iterator[State]:
        """All that may happen next."""
        for server in range(1 + self.replicas + s.added):
            if server in s.dead:
                continue
            if s.follows[server] == NOBODY:
                yield from self._of_master(s, server)
            else:
                yield from self._of_replica(s, server)
            if server != s.newest and s.newest not in s.dead and s.follows[server] != s.newest:
                yield _attached(s, server)
        if s.named != s.newest:
            yield s.but(named=s.newest)
        if s.added < self.added and s.newest not in s.dead:
            yield _attached(s.but(added=s.added + 1), 1 + self.replicas + s.added)

    def _of_master(self, s: State, server: int) -> Iterator[State]:
        if s.written < self.writes:
            yield s.but(logs=_put(s.logs, server, (*s.logs[server], s.written)), written=s.written + 1)
        links = [link for link in s.links if link.master == server]
        for place, write in enumerate(s.logs[server]):
            confirmed = sum(link.confirmed > place for link in links)
            seen = Confirmed(len(links), confirmed, s.named == server)
            if write not in s.acknowledged and self.rule(seen, self.replicas):
                yield s.but(acknowledged=s.acknowledged | {write})
        for link in links:
            if s.follows[link.replica] != server:  # the master sees that the link is cut
                yield s.but(links=s.links - {link})

    def _of_replica(self, s: State, server: int) -> Iterator[State]:
        master, has = s.follows[server], len(s.logs[server])
        if master not in s.dead and has < len(s.logs[master]):
            yield s.but(logs=_put(s.logs, server, s.logs[master][: has + 1]))
        for link in s.links:
            if (link.master, link.replica) == (master, server) and link.confirmed < has:
                yield s.but(links=s.links - {link} | {link._replace(confirmed=has)})
        if s.promotions < self.promotions:
            dead = s.dead if self.planned else s.dead | {s.newest}
            follows = _put(s.follows, server, NOBODY)
            yield s.but(follows=follows, newest=server, promotions=s.promotions + 1, dead=dead)


def _attached(s: State, server: int) -> State:
    """Return the state in which a server has dropped what the newest master does not have, and follows that."""
    kept = {link for link in s.links if (link.master, link.replica) != (s.newest, server)}
    links = frozenset(kept | {Link(s.newest, server, 0)})
    return s.but(logs=_put(s.logs, server, s.logs[s.newest]), follows=_put(s.follows, server, s.newest), links=links)


def _put(values: tuple[Any, ...], place: int, value: object) -> tuple[Any, ...]:
    return (*values[:place], value, *values[place + 1 :])


def explore(model: Model) -> tuple[int, bool]:
    """Return how many states can be reached, and whether any is broken; with the first of them the search ends."""
    start = model.start()
    known, waiting = {start}, deque([start])
    while waiting:
        for state in model.steps(waiting.popleft()):
            if state.broken:
                return len(known), True
            if state not in known:
                known.add(state)
                waiting.append(state)
    return len(known), False
