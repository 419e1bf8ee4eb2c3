"""Experience from actors to a learner, as a small model, explored breadth first over all interleavings.

Actors enter, ask for a prompt, reserve room for an item, store its bytes and put it. A learner takes the term, claims,
takes whole lots, trains on some of them, rejects others or gives them back, and publishes versions that say what they
were trained on. Actors and learners may be killed at any point, evicted or replaced while they sleep; a call may be
repeated since its reply was lost, land a second time, late, or be given up; the server may be started again, with all
that it had or without its last writes. `Rollouts.broken` says what must never be; and from every state the run must be
able to end. Each mutant leaves one check out, as in `model`.

Not here, since `publishing_model` has it: the shards of a version and their bytes, and how a learner finds out whether
its call was committed. Not here at all: times, a server's torn file, and clusters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple, cast

from protocol.model import Result, explore
from protocol.publishing_scripts import put as at
from protocol.rollouts_scripts import Scripts
from protocol.rollouts_state import (
    KEPT,
    NO_FAULTS,
    Actor,
    Call,
    Fate,
    Faults,
    Id,
    Item,
    Learner,
    Made,
    Name,
    State,
    Taken,
    lots,
)

OUT, ASK, OFFER, STORE, PUT, GONE = "out", "ask", "offer", "store", "put", "gone"  # what an actor does next
CLAIM, TAKE, WORK, SETTLE, PUBLISH, READY = "claim", "take", "work", "settle", "publish", "ready"  # and a learner
REFUSED = ("RESTARTED", "EVICTED", "TERM", "PAST", "FULL", "OFFER", "BASE", "TAKEN", "PART", "PLANNED", "STALE", "HEAD")


class Move(NamedTuple):
    """What may happen next. `sure` is false for faults, and for what nobody needs."""

    label: str
    state: State
    sure: bool = True


Then = Callable[[str, tuple[Any, ...], State], State]


@dataclass(frozen=True)
class Rollouts:
    """A run at small bounds. Without prompts each actor makes `makes` items, and a lot is one item. The learner takes
    at most `takes` lots at once, by calls that wait for `least`; if it `insists`, it publishes none but that many, as
    long as more may come."""

    faults: Faults = NO_FAULTS
    without: frozenset[str] = frozenset()
    prompts: int = 2
    group: int = 1
    actors: int = 2
    learners: int = 1
    capacity: int = 1
    staleness: int = 0
    again: bool = True
    takes: int = 1
    least: int = 1
    insists: bool = False
    makes: int = 1

    @cached_property
    def scripts(self) -> Scripts:
        sizes = (self.prompts, self.group, self.capacity, self.staleness)
        return Scripts(self.without, *sizes, self.again, names=self.staleness + 2)

    def start(self) -> State:
        none = (None,) * self.actors
        return State(
            *((Made(0, 0, ()),), None, None, 0, 0, Taken(0, 0, ()), none, (0,) * self.actors, frozenset(), frozenset()),
            *((), 1, frozenset(), frozenset(), 0),
            *(0, None, (Learner(OUT),) * self.learners, tuple(Actor(OUT, a + 1) for a in range(self.actors))),
            *(None, 0, self.actors, frozenset(), self.faults),
        )

    def over(self, s: State) -> bool:
        """Whether all prompts are closed, nobody works, and nothing is left behind."""
        idle = all(a.does in (OUT, GONE) for a in s.actors) and not any(s.incs) and s.history == s.life
        made = len(s.closed) == self.prompts if self.prompts else all(a.does == GONE for a in s.actors)
        return idle and made and not s.items and not s.bytes

    def steps(self, s: State) -> Iterator[Move]:
        """All that may happen next."""
        for a, actor in enumerate(s.actors):
            yield from self._actor(s, a, actor)
            if actor.does != GONE and (t := s.spending("kills")):
                yield Move(f"a{a} is killed", self._having(t, a, actor._replace(does=GONE)), sure=False)
        for n, learner in enumerate(s.learners):
            yield from self._learner(s, n, learner)
            if learner.does != OUT and (t := s.spending("crashes")):
                yield Move(f"l{n} is killed", self._with(t, n, Learner(OUT)), sure=False)
        if s.late:
            answer, _, t = self._called(s, s.late)
            yield Move(f"a late {s.late.script} lands: {answer}", t._replace(late=None))
        if s.disk:
            yield Move("the server is killed, and restarted", s.reborn(s.disk), sure=False)
        elif t := s.spending("losses"):
            yield Move("the disk has all that is written", t._replace(disk=t[:KEPT]), sure=False)
        if t := s.spending("restarts"):
            yield Move("the server is restarted", t.reborn(t[:KEPT]), sure=False)
        if s.history != s.life:
            yield Move("somebody sees the restart", self.scripts.recover(s))
        t = s if len(s.closed) == self.prompts else s.spending("sweeps")
        if t and (swept := self.scripts.free(t)).bytes != s.bytes:
            yield Move("bytes are freed", swept)

    def _having(self, s: State, a: int, actor: Actor) -> State:
        return s._replace(actors=at(s.actors, a, actor))

    def _with(self, s: State, n: int, learner: Learner) -> State:
        return s._replace(learners=at(s.learners, n, learner))

    def _calls(self, s: State, who: str, call: Call, then: Then, sure: bool = True) -> Iterator[Move]:
        """Call a script, and go on by its answer. A repeat is the same step once more."""
        answer, value, t = self._called(s, call)
        after = then(answer, value, t)
        label = f"{who}: {call.script} {call.seq or call.number or ''}: {answer}"
        if after != s:
            yield Move(label, after, sure)
        if t != s and (lost := t.spending("lost")):
            yield Move(f"{label}, the reply is lost", lost, sure=False)
        if not s.late and (late := s.spending("late")):
            yield Move(f"{label}, but later", late._replace(late=call), sure=False)

    def _called(self, s: State, c: Call) -> tuple[str, tuple[Any, ...], State]:
        """Call a script, and judge what it did."""
        answer, value, t = self.scripts.call(s, c)
        if t == s or t.wrong:
            return answer, value, t
        wrong, back = "", s
        if (c.script, answer) == ("put", "STALE"):
            back = s._replace(offers=s.offers - {(c.who, c.inc, c.seq)})
        if c.script in ("prompt", "offer", "put") and not s.present(c):
            wrong = "an incarnation that has ended does something"
        elif c.term and c.term != s.term:
            wrong = f"a deposed learner's {c.script} does something"
        elif s.history != s.life:
            wrong = "something is done before anybody has seen the restart"
        elif answer in REFUSED and t != back:
            wrong = "a call that is refused writes something"
        elif c.script == "enter" and (before := s.incs[c.who]) and before.nonce == c.nonce:
            wrong = "an incarnation is entered twice"
        elif c.script == "take" and any(self.scripts.stale(s, (i,)) for i in s.items if i.id in value):
            wrong = "a lot is taken that is too stale"
        elif c.script == "settle" and set(c.ids) - {i.id for i in s.items if i.taken and s.claimed == c.term}:
            wrong = "what is settled is not taken"
        elif answer == "FLIPPED" and s.plan and s.plan.ids and s.claimed != c.term:
            wrong = "a version is trained on what an earlier term has taken"
        return answer, value, t._replace(wrong=wrong) if wrong else t

    # -- actors -----------------------------------------------------------------------------------------------

    def _actor(self, s: State, a: int, p: Actor) -> Iterator[Move]:
        """One step of an actor's process."""
        who, inc = f"a{a}.{p.inc}", s.incs[a]
        in_order = s.history == s.life and inc and inc.number == p.inc

        def told(t: State, answer: str, *orderly: str) -> State:
            """Go out if the answer is none that an actor in order gets."""
            if answer in orderly:
                return t
            if in_order:
                t = t._replace(wrong=t.wrong or f"an actor in order is told {answer}")
            if answer == "RESTARTED":
                return t
            return self._having(t._replace(nonces=t.nonces + 1), a, Actor(OUT, t.nonces + 1, base=p.base))

        if p.does == GONE:
            if (p.inc and s.incs[a]) or len(s.closed) < self.prompts:
                dead = all(each.does == GONE for each in s.actors)
                t = s._replace(nonces=s.nonces + 1)
                yield Move(f"a{a} comes back", self._having(t, a, Actor(OUT, t.nonces)), sure=dead)
        elif p.does == OUT:
            call = Call("enter", a, nonce=p.nonce)
            ready = p._replace(does=ASK, seq=1)
            yield from self._calls(
                s, who, call, lambda x, v, t: self._having(t, a, ready._replace(inc=v[0])) if x == "OK" else t
            )
        elif p.does == ASK:
            yield from self._asks(s, a, p, told)
        elif p.does == OFFER:
            then = self._then(told, a, {"OK": p._replace(does=STORE), "CLOSED": p._replace(does=ASK)}, ("FULL",))
            yield from self._calls(s, who, Call("offer", a, p.inc, p.seq), then)
        elif p.does == STORE:
            name = (a, p.inc, p.seq)
            wrong = "bytes are changed under a name" if any(b[0] == name and b[1] != p.nonce for b in s.bytes) else ""
            stored = s._replace(bytes=s.bytes | {(name, p.nonce)}, wrong=wrong)
            yield Move(f"{who} stores {p.seq}", self._having(stored, a, p._replace(does=PUT)))
        elif p.does == PUT:
            yield from self._puts(s, a, p, told)
        if p.does in (STORE, PUT) and (t := s.spending("fails")):
            yield Move(f"{who} gives {p.seq} up", self._having(t, a, p._replace(does=ASK, seq=p.seq + 1)), sure=False)

    def _then(self, told: Any, a: int, go_on: dict[str, Actor], stay: tuple[str, ...] = ()) -> Then:
        """By the answer, be another actor; or go out."""

        def then(answer: str, _: tuple[Any, ...], t: State) -> State:
            t = self._having(t, a, go_on[answer]) if answer in go_on else t
            return cast(State, told(t, answer, *go_on, *stay))

        return then

    def _asks(self, s: State, a: int, p: Actor, told: Any) -> Iterator[Move]:
        """Ask for a prompt, and generate on the newest version; or leave."""
        who, gone = f"a{a}.{p.inc}", p._replace(does=GONE)
        newest = p._replace(does=OFFER, base=s.versions[-1])
        done = not self.prompts and p.seq > self.makes
        if done or (s.spending("quits") and self.prompts):
            t = s if done else cast(State, s.spending("quits"))
            yield from self._calls(t, who, Call("quit", a, p.inc), self._then(told, a, {"OK": gone}), done)
        if not self.prompts and not done:
            yield Move(f"{who} generates on {newest.base}", self._having(s, a, newest))
            if p.base != newest.base and (t := s.spending("lags")):
                yield Move(f"{who} generates on {p.base}", self._having(t, a, newest._replace(base=p.base)), sure=False)
        if not self.prompts:
            return

        def then(answer: str, value: tuple[Any, ...], t: State, base: Name = newest.base) -> State:
            if answer == "OK":
                t = self._having(t, a, newest._replace(prompt=value[0], base=base))
            elif answer == "DONE":
                t = self._having(self.scripts.quit(t, Call("quit", a, p.inc))[2], a, gone)
            return cast(State, told(t, answer, "OK", "DONE", "WAIT"))

        yield from self._calls(s, who, Call("prompt", a, p.inc), then)
        if p.base != newest.base and (t := s.spending("lags")):
            lagging = partial(then, base=p.base)
            yield from self._calls(t, f"{who} lags", Call("prompt", a, p.inc), lagging, sure=False)

    def _puts(self, s: State, a: int, p: Actor, told: Any) -> Iterator[Move]:
        call = Call("put", a, p.inc, p.seq, p.prompt, p.base, p.nonce)
        after = p._replace(does=ASK, seq=p.seq + 1)
        then = self._then(told, a, {"OK": after, "CLOSED": after, "STALE": after})

        def accepted(answer: str, value: tuple[Any, ...], t: State) -> State:
            t = t._replace(told=t.told | {(a, p.inc, p.seq)}) if answer == "OK" else t
            if answer == "BASE" and p.base not in s.versions:  # it was made on a version that is lost
                return self._having(t, a, after._replace(base=(0, 0)))
            late = answer in ("CLOSED", "STALE")
            if late and (a, p.inc, p.seq) in {*t.fates(), *(i.id for i in t.items)}:
                t = t._replace(wrong="an actor is told that an accepted item came too late")
            if late and (a, p.inc, p.seq) in t.offers:
                t = t._replace(wrong="room is reserved for what is not to come")
            if answer == "STALE" and s.version - p.base[0] <= self.staleness:
                t = t._replace(wrong="an item is refused that is not too stale")
            return then(answer, value, t)

        yield from self._calls(s, f"a{a}.{p.inc}", call, accepted)

    # -- learners ---------------------------------------------------------------------------------------------

    def _learner(self, s: State, n: int, p: Learner) -> Iterator[Move]:
        """One step of a learner's process."""
        if p.does != OUT and s.lease == n and (t := s.spending("lapses")):
            yield Move(f"l{n} finds that its lease has expired", self._out(t._replace(lease=None), n, p), sure=False)
        if p.does == OUT:
            held = s.lease not in (n, None)
            t = s.spending("takeovers") if held else s
            if t and s.history == s.life and not self.over(s):
                t, mine = self.scripts.acquire(t, n), Learner(OUT) if held else p
                after = mine._replace(does=CLAIM, term=t.term)
                yield Move(f"l{n} takes term {t.term}", self._with(t, n, after), sure=not held)
                if hasty := t.spending("hasty"):
                    after = after._replace(does=WORK if p.held else TAKE, base=s.versions[-1], ids=(), call=0)
                    yield Move(f"l{n} takes term {t.term}, and claims nothing", self._with(hasty, n, after), sure=False)
        elif p.does == CLAIM:
            yield from self._claims(s, n, p, self._dead(s))
        elif p.does == TAKE:
            if self._dead(s):
                yield from self._claims(s, n, p, self._dead(s))
            yield from self._takes(s, n, p)
        for a in range(self.actors) if p.does in (TAKE, WORK) else ():
            if s.incs[a] and s.actors[a].does != GONE and (t := s.spending("evictions")):
                yield from self._claims(t, n, p, (a,), sure=False)
        if p.does in (TAKE, WORK) and (t := s.spending("empties")):
            yield self._begins(t, n, p, (), sure=False)
        if p.does == WORK:
            yield from self._works(s, n, p)
        elif p.does == SETTLE:
            call = Call("settle", n, term=p.term, number=p.number, ids=p.ids, back=p.back)
            left = tuple(i for i in p.held if i not in p.ids)
            after = p._replace(does=WORK if left else TAKE, held=left, ids=(), number=p.number + 1)
            yield from self._calls(s, f"l{n}", call, self._goes(n, p, {"OK": after, "PART": p._replace(does=WORK)}))
            if t := s.spending("fails"):
                after = p._replace(does=WORK, ids=(), number=p.number + 1, unsure=True)
                yield Move(f"l{n} gives its settle up", self._with(t, n, after), sure=False)
        elif p.does == PUBLISH:
            call = Call("publish", n, base=p.base, nonce=p.call, term=p.term, ids=p.ids)
            back = p._replace(does=SETTLE, ids=p.held, back=True, call=0)
            go_on = {"OK": p._replace(does=READY), "STALE": back, "PART": back}
            yield from self._calls(s, f"l{n} with {len(p.ids)}", call, self._goes(n, p, go_on))
        elif p.does == READY:
            yield from self._readies(s, n, p)

    def _goes(self, n: int, p: Learner, go_on: dict[str, Learner]) -> Then:
        """By the answer, be another learner; or, if the answer is none that is expected, take a new term."""

        def then(answer: str, _: tuple[Any, ...], t: State) -> State:
            if answer in go_on:
                return self._with(t, n, go_on[answer])
            in_order = p.term == t.term and t.history == t.life and (p.does == CLAIM or p.term == t.claimed)
            if in_order and not p.unsure:
                t = t._replace(wrong=t.wrong or f"a learner in order is told {answer}")
            return self._out(t, n, p) if answer != "RESTARTED" else t

        return then

    def _out(self, s: State, n: int, p: Learner) -> State:
        """A learner needs a new term. If no other one has the lease, it keeps what it holds, and its publish."""
        if s.lease not in (n, None):
            return self._with(s, n, Learner(OUT))
        return self._with(s, n, Learner(OUT, base=p.base, held=p.held, ids=p.ids if p.call else (), call=p.call))

    def _dead(self, s: State) -> tuple[int, ...]:
        """Actors that are silent since they were killed."""
        return tuple(a for a, p in enumerate(s.actors) if p.does == GONE and s.incs[a])

    def _claims(self, s: State, n: int, p: Learner, silent: tuple[int, ...], sure: bool = True) -> Iterator[Move]:
        first = p.does == CLAIM
        call = Call("claim", n, term=p.term, number=p.number * first, ids=p.held * first, silent=silent)

        def then(answer: str, kept: tuple[Any, ...], t: State) -> State:
            after = p
            if first:  # a publish goes on if nothing that it needs is gone; if it was done, there is a newer version
                after = p._replace(does=WORK if kept else TAKE, base=t.versions[-1], held=kept, ids=(), call=0)
                if p.call and set(p.ids) <= set(kept) and p.base == after.base:
                    after = after._replace(does=PUBLISH, ids=p.ids, call=p.call)
                after = after._replace(number=p.number + 1)
            return self._goes(n, p, {"OK": after})(answer, kept, t)

        yield from self._calls(s, f"l{n} sees {silent} silent", call, then, sure)

    def _takes(self, s: State, n: int, p: Learner) -> Iterator[Move]:
        held = len(self._lots(s, p.held))
        least = max(self.least - held, 1)
        call = Call("take", n, term=p.term, number=p.number, lots=self.takes - held, least=least)

        def then(answer: str, value: tuple[Any, ...], t: State) -> State:
            if set(value) & set(p.held):
                t = t._replace(wrong="a learner is given what it has taken already")
            got = p._replace(held=p.held + value, number=p.number + (answer == "OK"))
            enough = len(self._lots(t, got.held))
            insists = self.insists and enough < self.takes and self.prompts - len(t.closed) > enough
            after = got._replace(does=WORK if got.held and not insists else TAKE)
            return self._goes(n, p, {"OK": after, "EMPTY": after})(answer, value, t)

        yield from self._calls(s, f"l{n}", call, then)

    def _lots(self, s: State, ids: tuple[Id, ...]) -> list[tuple[Id, ...]]:
        """Ids by lot, as the answer of take names them."""
        of = {i.id: i.prompt or i.id for i in s.items}
        return [tuple(i for i in ids if of.get(i, i) == lot) for lot in dict.fromkeys(of.get(i, i) for i in ids)]

    def _works(self, s: State, n: int, p: Learner) -> Iterator[Move]:
        """Train: on all that it holds, or on the first lot; reject or give back the first lot; or publish nothing."""
        mine = self._lots(s, p.held)
        for ids in dict.fromkeys([p.held, mine[0]]):
            yield self._begins(s, n, p, ids)
        if len(mine[0]) > 1 and (t := s.spending("halves")):
            yield self._begins(t, n, p, mine[0][:1], sure=False)
            after = p._replace(does=SETTLE, ids=mine[0][:1])
            yield Move(f"l{n} is to settle a part", self._with(t, n, after), sure=False)
        for fault, back in (("rejects", False), ("backs", True)):
            if t := s.spending(fault):
                after = p._replace(does=SETTLE, ids=mine[0], back=back)
                yield Move(f"l{n} is to settle {mine[0]}, back={back}", self._with(t, n, after), sure=False)

    def _begins(self, s: State, n: int, p: Learner, ids: tuple[Id, ...], sure: bool = True) -> Move:
        after = p._replace(does=PUBLISH, ids=ids, call=s.calls + 1)
        return Move(f"l{n} trains on {ids}", self._with(s._replace(calls=s.calls + 1), n, after), sure)

    def _readies(self, s: State, n: int, p: Learner) -> Iterator[Move]:
        call = Call("ready", n, base=p.base, nonce=p.call, term=p.term)
        left = tuple(i for i in p.held if i not in p.ids)
        name = (p.base[0] + 1, p.call)
        after = p._replace(does=WORK if left else TAKE, held=left, ids=(), call=0, base=name)

        def then(answer: str, value: tuple[Any, ...], t: State) -> State:
            mine = {"FLIPPED": after} | ({"ALREADY": after} if name in t.versions else {})
            return self._goes(n, p, mine)(answer, value, t)

        yield from self._calls(s, f"l{n}", call, then)

    # -- the judge --------------------------------------------------------------------------------------------

    def broken(self, s: State) -> str:
        """What is wrong with a state, or ""."""
        return s.wrong or self._fates(s) or self._room(s) or self._prompts(s) or self._taken(s)

    def _fates(self, s: State) -> str:
        fates, here = s.fates(), [i.id for i in s.items]
        if len(set(fates)) < len(fates):
            return "an item has two fates"
        if len(set(here)) < len(here) or set(fates) & set(here):
            return "an item is there twice, or after its fate"
        if not s.told <= {*fates, *here}:
            return "an item that was acknowledged has no fate"
        for entry in s.log:
            stale = [entry.version - isinstance(entry, Made) - i.base[0] > self.staleness for i in entry.items]
            if isinstance(entry, Made) and any(stale):
                return "a version is trained on what is too stale"
            if isinstance(entry, Fate) and entry.kind == "dropped" and not any(stale):
                return "an item is dropped that is not too stale"
        return ""

    def _room(self, s: State) -> str:
        if any(not (inc := s.incs[a]) or inc.number != number for a, number, _ in s.offers):
            return "room is reserved for an incarnation that has ended"
        if len({o[0] for o in s.offers}) < len(s.offers) or any(
            (inc := s.incs[a]) and seq <= inc.last for a, _, seq in s.offers
        ):
            return "room is reserved for what is not to come"
        f = self.faults
        ends = (
            f.kills or f.evictions or f.quits or f.restarts or f.losses
        )  # of incarnations; without them it is tighter
        beyond = self.actors * (self.group - 1) + 1
        most = max(self.capacity, beyond if ends else min(self.capacity + self.group, beyond))
        if len(s.items) + len(s.offers) > most:
            return "there are more items than the bound"
        if any((i.id, i.of) not in s.bytes for i in s.items):
            return "an item has no bytes, or another's"
        return ""

    def _prompts(self, s: State) -> str:
        sizes = {lot: len(items) for lot, items in lots(s.items).items()}
        if any(sizes[lot] > self.group for lot in sizes if isinstance(lot, int)):
            return "a lot has too many items"
        if any((inc := s.incs[a]) is None or inc.number != number for _, a, number in s.holds):
            return "an incarnation that has ended holds a prompt"
        held = [h[0] for h in s.holds]
        if len(set(held)) < len(held) or len({h[1] for h in s.holds}) < len(held):
            return "a prompt has two holders, or an actor two prompts"
        if any(sizes.get(p, 0) >= self.group for p in held):
            return "a prompt is out though its lot is whole"
        ended = self._ended(s)
        if any(count > 1 for count in ended.values()):
            return "a prompt ends twice"
        if set(ended) != s.closed:
            return "a prompt is closed without a fate, or has its fate and is open"
        return "a prompt that is closed is out" if set(held) & s.closed else ""

    def _ended(self, s: State) -> dict[int, int]:
        """How often the log says of each prompt that it has ended."""
        ended: dict[int, int] = {}
        for entry in s.log:
            if isinstance(entry, Made) or entry.kind == "rejected" or not self.again:
                for prompt in {i.prompt for i in entry.items if i.prompt}:
                    ended[prompt] = ended.get(prompt, 0) + 1
        return ended

    def _taken(self, s: State) -> str:
        def parts(items: tuple[Item, ...]) -> bool:
            return any(len(each) < self.group for lot, each in lots(items).items() if isinstance(lot, int))

        if any(parts(e.items) for e in s.log if isinstance(e, Made) or e.kind == "rejected"):
            return "a part of a lot has a fate of its own"
        if any(len({i.taken for i in items}) > 1 for items in lots(s.items).values()):
            return "a part of a lot is taken"
        if parts(tuple(i for i in s.items if i.taken)):
            return "a lot is taken that is not whole"
        return ""


def explored(model: Rollouts, limit: int = 5_000_000, first: bool = False) -> Result:
    """Visit all states that can be reached, as `explore` does with the model of the commit protocol."""
    return explore(cast(Any, model), limit, first)
