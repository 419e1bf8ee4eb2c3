"""What is in Redis of the experience of a published job, and each Lua script as one method.

The half of the model of experience that must follow `kvps/protocol/lua`; `rollouts_state` has the records, and
`rollouts_model` the processes. The mutants say which check they leave out.
"""

from __future__ import annotations

from dataclasses import dataclass

from protocol.publishing_scripts import put as at
from protocol.rollouts_state import Call, Fate, Id, Incarnation, Item, Made, Name, Plan, State, Taken, lots

MUTANTS = {
    "restart": "all scripts: also after a restart of the server, before somebody has called recover",
    "end-offers": "an incarnation that ends (enter, quit, claim, recover) keeps its offers",
    "end-prompts": "an incarnation that ends keeps its prompt",
    "enter-ends": "enter: the earlier incarnation keeps offers and prompt",
    "enter-repeat": "enter: a repeat of the nonce gets another incarnation",
    "enter-number": "enter: incarnations are numbered without a nonce, so a loss brings a number again",
    "offer-inc": "offer: of any incarnation",
    "offer-past": "offer: a late copy reserves room for an item that was put",
    "offer-given-up": "offer: a late copy of what was given up takes the place of a newer offer",
    "offer-repeat": "offer: a repeat needs room once more",
    "offer-earlier": "offer: an offer that this incarnation has given up stays",
    "offer-full": "offer: there is always room",
    "offer-taken": "offer: taken items fill no room",
    "offer-offers": "offer: offers fill no room",
    "offer-lowest": "offer: no prompt has room beyond the capacity",
    "offer-held": "offer: the lowest prompt that was begun has room beyond the capacity, also if nobody holds it",
    "offer-any": "offer: each prompt has room beyond the capacity, as long as no lot is whole",
    "offer-whole": "offer: the lowest prompt has room beyond the capacity, also if a lot is whole",
    "offer-nearly": "offer: the lowest prompt has room beyond the capacity, also if an offer makes a lot whole",
    "put-inc": "put: of any incarnation",
    "put-offer": "put: without an offer",
    "put-repeat": "put: a repeat is a new item",
    "put-fate": "put: a repeat is a new item as soon as the first has had its fate",
    "put-base": "put: a base is a number, of whichever history",
    "put-old": "put: a base that is older than all names that are kept is a base of another history",
    "put-unknown": "put: a base whose name is not kept is believed",
    "put-few": "put: the names of fewer versions are kept than an item may be old",
    "put-old-first": "put: a base that is too old by now is refused also if the item was accepted before",
    "put-old-offer": "put: an item whose base is too old keeps its room",
    "put-old-repeat": "put: looks for the offer before it looks how old the base is",
    "put-prompt": "put: for any prompt",
    "put-closed": "put: an item that came too late for its prompt keeps its room",
    "put-whole": "put: who makes a lot whole goes on holding the prompt",
    "prompt-inc": "prompt: for any incarnation",
    "prompt-repeat": "prompt: a repeat gets another one",
    "prompt-held": "prompt: hands out also what another one holds",
    "prompt-whole": "prompt: hands out also prompts whose lot is whole",
    "prompt-free": "prompt: what was given back is not handed out again",
    "prompt-closed": "prompt: hands out also prompts that are closed",
    "claim-term": "claim: of any term",
    "claim-back": "claim: what an earlier term has taken stays taken",
    "claim-own": "claim: what this term has taken itself waits again",
    "claim-keeps": "claim: also what is named waits again",
    "claim-there": "claim: says that all is kept that is named",
    "claim-whole": "claim: keeps also a part of a lot",
    "claim-repeat": "claim: a repeat looks again what is there",
    "claim-past": "claim: a late copy takes again what was given back since",
    "claim-accepted": "claim: an actor that is evicted loses its accepted items",
    "claim-evicts": "claim: silent actors stay",
    "take-term": "take: of any term",
    "take-claimed": "take: of a term that has not claimed",
    "take-full": "take: waits for more lots though they have no room",
    "take-last": "take: waits for more lots though none are to come",
    "take-stale": "take: too stale lots stay and are taken",
    "take-fresh": "take: drops also what is as stale as it may be",
    "take-part": "take: also lots that are not whole",
    "take-taken": "take: also what is taken already",
    "take-repeat": "take: a repeat takes others",
    "take-past": "take: a late copy of an earlier call takes others",
    "drop-again": "take: a prompt that is dropped is closed, though it is to be handed out again",
    "drop-closes": "take: a prompt that is dropped stays open, though it is not to be handed out again",
    "drop-holder": "take: a prompt that is closed stays in the hand of its holder",
    "drop-part": "take: lots that are not whole are never too stale",
    "drop-log": "take: drops without an entry of the log",
    "settle-term": "settle: of any term",
    "settle-claimed": "settle: of a term that has not claimed",
    "settle-taken": "settle: also what is not taken",
    "settle-whole": "settle: also a part of a lot",
    "settle-repeat": "settle: a repeat finds nothing to settle",
    "settle-past": "settle: a late copy of an earlier call settles",
    "settle-planned": "settle: also what the open plan names",
    "settle-closes": "settle: the prompt of a rejected lot stays open",
    "publish-term": "publish: of any term",
    "publish-claimed": "publish: with items, of a term that has not claimed",
    "publish-anew": "publish: a plan that an earlier term of the same call has opened stays as it is",
    "publish-taken": "publish: also what this term has not taken",
    "publish-whole": "publish: also a part of a lot",
    "publish-stale": "publish: whatever has become too stale since it was taken",
    "publish-first": "publish: opens the plan before it checks the items",
    "ready-term": "ready: of any term",
    "ready-claimed": "ready: of a plan with items, by a term that has not claimed",
    "ready-taken": "ready: also if the plan's items are no longer taken",
    "ready-fates": "ready: makes the version, but its items stay",
    "ready-closes": "ready: makes the version, but its prompts stay open",
    "recover-incs": "recover: incarnations go on",
    "recover-terms": "recover: terms go on",
    "free-fate": "free: also bytes of items that are taken",
    "free-offers": "free: also bytes of items that are offered",
}


@dataclass(frozen=True)
class Scripts:
    """The Lua scripts: each takes the state and a call, and returns its answer, a value, and the state it leaves."""

    without: frozenset[str]
    prompts: int
    group: int
    capacity: int
    staleness: int
    again: bool
    names: int  # of how many versions the names are kept

    def has(self, check: str) -> bool:
        return check not in self.without

    def call(self, s: State, c: Call) -> tuple[str, tuple[int, ...] | tuple[Id, ...], State]:
        if s.history != s.life and self.has("restart"):
            return "RESTARTED", (), s
        answer: tuple[str, tuple[int, ...] | tuple[Id, ...], State] = getattr(self, c.script)(s, c)
        return answer

    # -- actors -----------------------------------------------------------------------------------------------

    def enter(self, s: State, c: Call) -> tuple[str, tuple[int, ...], State]:
        before = s.incs[c.who]
        if before and before.nonce == c.nonce and self.has("enter-repeat"):
            return "OK", (before.number,), s
        number = max(s.entered[c.who], 10 * s.life if self.has("enter-number") else 0) + 1
        t = self._ends(s, c.who) if self.has("enter-ends") else s
        t = t._replace(entered=at(s.entered, c.who, number))
        return "OK", (number,), t._replace(incs=at(t.incs, c.who, Incarnation(number, c.nonce)))

    def quit(self, s: State, c: Call) -> tuple[str, tuple[int, ...], State]:
        return "OK", (), self._ends(s, c.who) if s.present(c) else s

    def _ends(self, s: State, a: int) -> State:
        """An incarnation ends: its offers and its prompt are given back, what is accepted stays."""
        offers = {o for o in s.offers if o[0] != a} if self.has("end-offers") else s.offers
        holds = {h for h in s.holds if h[1] != a} if self.has("end-prompts") else s.holds
        return s._replace(incs=at(s.incs, a, None), offers=frozenset(offers), holds=frozenset(holds))

    def prompt(self, s: State, c: Call) -> tuple[str, tuple[int, ...], State]:
        """Hand out the prompt that the actor has already; or the lowest one that was given back; or the next one."""
        if not s.present(c) and self.has("prompt-inc"):
            return "EVICTED", (), s
        mine = s.held(c.who, c.inc)
        if mine and self.has("prompt-repeat"):
            return "OK", (mine,), s
        whole = {lot for lot, items in lots(s.items).items() if len(items) >= self.group and self.has("prompt-whole")}
        others = {h[0] for h in s.holds} if self.has("prompt-held") else set()
        closed = s.closed if self.has("prompt-closed") else frozenset()
        free = set(range(1, s.next)) - whole - others - closed if self.has("prompt-free") else set()
        found = min(free, default=s.next)
        if found > self.prompts:
            return "DONE" if len(s.closed) == self.prompts else "WAIT", (), s
        t = s._replace(next=max(s.next, found + 1), holds=s.holds | {(found, c.who, c.inc)})
        return "OK", (found,), t

    def offer(self, s: State, c: Call) -> tuple[str, tuple[int, ...], State]:
        """Reserve room for an item, in place of what this incarnation has offered before and not put."""
        present = s.present(c)
        if not present and self.has("offer-inc"):
            return "EVICTED", (), s
        if (c.who, c.inc, c.seq) in s.offers and self.has("offer-repeat"):
            return "OK", (), s
        known = present.last if present and not self.has("offer-given-up") else present.offered if present else 0
        if c.seq <= known and self.has("offer-past"):
            return "PAST", (), s
        if self.prompts and not s.held(c.who, c.inc):
            return "CLOSED", (), s
        mine = {o for o in s.offers if o[:2] == (c.who, c.inc) and o[2] != c.seq and self.has("offer-earlier")}
        if not self._room(s, c, s.offers - mine):
            return "FULL", (), s
        t = s._replace(offers=s.offers - mine | {(c.who, c.inc, c.seq)})
        return "OK", (), t._replace(incs=at(t.incs, c.who, present._replace(offered=c.seq))) if present else t

    def _room(self, s: State, c: Call, offers: frozenset[Id]) -> bool:
        """Capacity counts what waits, what is taken and what is offered. But if no lot is whole and none will be by the
        offers that are out, the lowest prompt that somebody holds has room beyond it, or nobody could ever go on."""
        counted = [i for i in s.items if not i.taken or self.has("offer-taken")]
        used = len(counted) + (len(offers) if self.has("offer-offers") else 0)
        if used < self.capacity or not self.has("offer-full"):
            return True
        if not self.prompts or not self.has("offer-lowest"):
            return False
        sizes = {lot: len(items) for lot, items in lots(s.items).items()}
        if self.has("offer-nearly"):
            for a, inc, _ in offers:
                if lot := s.held(a, inc):
                    sizes[lot] = sizes.get(lot, 0) + 1
        if self.has("offer-whole") and any(size >= self.group for size in sizes.values()):
            return False
        begun = {p for p in range(1, s.next) if p not in s.closed}
        lowest = min({h[0] for h in s.holds} if self.has("offer-held") else begun, default=0)
        return s.held(c.who, c.inc) == lowest or not self.has("offer-any")

    def put(self, s: State, c: Call) -> tuple[str, tuple[int, ...], State]:
        """Accept an item whose bytes are stored. One number tells whether it was accepted before: the last one."""
        present = s.present(c)
        if not present and self.has("put-inc"):
            return "EVICTED", (), s
        name = (c.who, c.inc, c.seq)
        t = s._replace(offers=s.offers - {name})
        names = s.versions[-(self.names if self.has("put-few") else self.staleness) :]
        old = c.base[0] < names[0][0] and self.has("put-old")
        if old and not self.has("put-old-first"):
            return "STALE", (), t
        known = self.has("put-fate") or any(i.id == name for i in s.items)
        if present and c.seq <= present.last and known and self.has("put-repeat"):
            return "OK", (), s
        if self.prompts and (c.prompt, c.who, c.inc) not in s.holds and self.has("put-prompt"):
            return "CLOSED", (), t if self.has("put-closed") else s
        if old and (name in s.offers or self.has("put-old-repeat")):  # its offer is gone if this is a repeat
            return "STALE", (), t if self.has("put-old-offer") else s
        if name not in s.offers and self.has("put-offer"):
            return "OFFER", (), s
        if not self._named(c.base, names):
            return "BASE", (), s
        t = t._replace(items=(*t.items, Item(*name, c.base, c.prompt, c.nonce)))
        if present:
            t = t._replace(incs=at(t.incs, c.who, present._replace(last=max(present.last, c.seq))))
        if c.prompt and len(lots(t.items)[c.prompt]) >= self.group and self.has("put-whole"):
            t = t._replace(holds=frozenset(h for h in t.holds if h[0] != c.prompt))
        wrong = "" if c.base in s.versions else "an item names a version that it was not made on"
        if c.base[0] < s.versions[-self.names :][0][0]:
            wrong = "an item names a version of which nobody knows the name"
        return "OK", (), t._replace(wrong=wrong)

    def _named(self, base: Name, names: list[Name]) -> bool:
        """Whether a version has the name that a base says."""
        numbers = [number for number, _ in names]
        if not self.has("put-base"):
            return base[0] in numbers
        return base in names or not (base[0] in numbers or self.has("put-unknown"))

    # -- learners ---------------------------------------------------------------------------------------------

    def acquire(self, s: State, learner: int) -> State:
        """Whoever holds the lease, it has expired. Terms have a nonce: one that was lost never comes again."""
        return s._replace(lease=learner, term=max(s.term, 10 * s.life) + 1)

    def claim(self, s: State, c: Call) -> tuple[str, tuple[int, ...], State]:
        """What earlier terms had taken waits again, except the whole lots that the call names: they are this term's.
        The answer says which. Silent actors are evicted. The first claim of a term is numbered, as take and settle are.
        A later one only evicts, and has no number: with the number of a take whose reply is lost it would pass for that
        take's repeat, and nobody would ever hear what was taken."""
        if c.term != s.term and self.has("claim-term"):
            return "TERM", (), s
        if c.number and s.last.term == c.term and c.number <= s.last.number:
            if c.number == s.last.number and self.has("claim-repeat"):
                return "OK", s.last.ids, s
            if c.number < s.last.number and self.has("claim-past"):
                return "PAST", (), s
        kept = self._kept(s, c.ids)
        if self.has("claim-back") and (s.claimed != c.term or not self.has("claim-own")):
            s = s.marked(tuple(i.id for i in s.items), False)
        s = s.marked(kept, True) if self.has("claim-keeps") else s
        if c.number:
            kept = kept if self.has("claim-there") else c.ids
            s = s._replace(claimed=c.term, last=Taken(c.term, c.number, kept))
        for a in c.silent if self.has("claim-evicts") else ():
            if not self.has("claim-accepted"):
                s = s._replace(items=tuple(i for i in s.items if i.actor != a))
            s = self._ends(s, a)
        return "OK", kept, s

    def _kept(self, s: State, ids: tuple[Id, ...]) -> tuple[Id, ...]:
        """Those of the ids that are there with the whole of their lots."""
        kept: tuple[Id, ...] = ()
        for items in lots(s.items).values():
            named = tuple(i.id for i in items if i.id in ids)
            whole = len(named) == len(items) >= self._size(items)
            kept += named if whole or not self.has("claim-whole") else ()
        return kept

    def _claimed(self, s: State, c: Call) -> bool:
        """Whether what is taken is the caller's."""
        return s.claimed == c.term or not self.has(f"{c.script}-claimed")

    def take(self, s: State, c: Call) -> tuple[str, tuple[Id, ...], State]:
        """Drop what is too stale for the next version, then mark up to `lots` whole lots, oldest first; none if fewer
        than `least` wait and more may come. A term numbers its calls of claim, take and settle; the last number and its
        answer are kept. Finding nothing is no answer to keep."""
        if (c.term != s.term and self.has("take-term")) or not self._claimed(s, c):
            return "TERM", (), s
        if s.last.term == c.term and c.number <= s.last.number:
            if c.number == s.last.number and self.has("take-repeat"):
                return "OK", s.last.ids, s
            if c.number < s.last.number and self.has("take-past"):
                return "PAST", (), s
        s = self._drop(s)
        waiting = [items for items in lots(s.items).values() if not items[0].taken or not self.has("take-taken")]
        whole = [items for items in waiting if len(items) >= self._size(items) or not self.has("take-part")]
        ids = tuple(i.id for items in whole[: c.lots] for i in items)
        if not ids or (len(whole) < c.least and self._more(s)):
            return "EMPTY", (), s
        return "OK", ids, s.marked(ids, True)._replace(last=Taken(c.term, c.number, ids))

    def _more(self, s: State) -> bool:
        """Whether another lot may become whole before one is taken: it has room, and is not whole or closed already."""
        if len(s.items) + len(s.offers) >= self.capacity and self.has("take-full"):
            return False
        whole = {lot for lot, items in lots(s.items).items() if len(items) >= self._size(items)}
        ended = set(range(1, self.prompts + 1)) <= whole | s.closed
        return not self.prompts or not ended or not self.has("take-last")

    def _size(self, items: tuple[Item, ...]) -> int:
        return self.group if items[0].prompt else 1

    def stale(self, s: State, items: tuple[Item, ...]) -> bool:
        """Whether one of them is too stale for the next version: the one before it is the present one."""
        bound = self.staleness - (0 if self.has("take-fresh") else 1)
        return any(s.version - i.base[0] > bound for i in items)

    def _drop(self, s: State) -> State:
        for items in lots(s.items).values() if self.has("take-stale") else ():
            part = len(items) < self._size(items) and not self.has("drop-part")
            if items[0].taken or not self.stale(s, items) or part:
                continue
            closes = self.again != self.has("drop-again" if self.again else "drop-closes")
            s = s.without(items, Fate("dropped", s.version, items) if self.has("drop-log") else None)
            if closes and items[0].prompt:
                holds = {h for h in s.holds if h[0] != items[0].prompt} if self.has("drop-holder") else s.holds
                s = s._replace(closed=s.closed | {items[0].prompt}, holds=frozenset(holds))
        return s

    def settle(self, s: State, c: Call) -> tuple[str, tuple[int, ...], State]:
        """Reject whole lots with a reason, which closes their prompts; or give them back."""
        if (c.term != s.term and self.has("settle-term")) or not self._claimed(s, c):
            return "TERM", (), s
        if s.last.term == c.term and c.number <= s.last.number:
            if c.number == s.last.number and self.has("settle-repeat"):
                return "OK", (), s
            if c.number < s.last.number and self.has("settle-past"):
                return "PAST", (), s
        items = tuple(i for i in s.items if i.id in c.ids)
        if (len(items) < len(c.ids) or not all(i.taken for i in items)) and self.has("settle-taken"):
            return "TAKEN", (), s
        if s.plan and s.plan.term == s.term and set(s.plan.ids) & set(c.ids) and self.has("settle-planned"):
            return "PLANNED", (), s
        if self._parts(s, items) and self.has("settle-whole"):
            return "PART", (), s
        s = s._replace(last=Taken(c.term, c.number, ()))
        if c.back:
            return "OK", (), s.marked(c.ids, False)
        t = s.without(items, Fate("rejected", s.version, items))
        closes = {i.prompt for i in items if i.prompt} if self.has("settle-closes") else set()
        return "OK", (), t._replace(closed=t.closed | closes)

    def _parts(self, s: State, items: tuple[Item, ...]) -> bool:
        named, all_of = lots(items), lots(s.items)
        return any(len(each) < len(all_of[lot]) or len(each) < self._size(each) for lot, each in named.items())

    def publish(self, s: State, c: Call) -> tuple[str, tuple[int, ...], State]:
        """Open the plan of the next version. All checks come first: what is refused has written nothing."""
        if (c.term != s.term and self.has("publish-term")) or (c.ids and not self._claimed(s, c)):
            return "TERM", (), s
        if c.base != s.versions[-1]:
            return "HEAD", (), s
        if s.plan and s.plan.call == c.nonce and (s.plan.term == c.term or not self.has("publish-anew")):
            return "OK", (), s
        opened = s._replace(plan=Plan(c.base[0] + 1, c.term, c.nonce, c.ids))
        first = s if self.has("publish-first") else opened
        items = tuple(i for i in s.items if i.id in c.ids)
        if (len(items) < len(c.ids) or not all(i.taken for i in items)) and self.has("publish-taken"):
            return "TAKEN", (), first
        if self._parts(s, items) and self.has("publish-whole"):
            return "PART", (), first
        if self.stale(s, items) and self.has("publish-stale"):
            return "STALE", (), first
        return "OK", (), opened

    def ready(self, s: State, c: Call) -> tuple[str, tuple[int, ...], State]:
        """The version, the fate of its items and the end of their prompts are one step. There is one shard here."""
        if s.version > c.base[0]:
            return "ALREADY", (), s
        if c.term != s.term and self.has("ready-term"):
            return "TERM", (), s
        if not s.plan:
            return "NOPLAN", (), s
        if s.plan.call != c.nonce:
            return "PLAN", (), s
        if s.plan.ids and not self._claimed(s, c):
            return "TERM", (), s
        items = tuple(i for i in s.items if i.id in s.plan.ids)
        theirs = not items or s.plan.term == s.claimed
        lost = len(items) < len(s.plan.ids) or not all(i.taken for i in items) or not theirs
        if lost and self.has("ready-taken"):
            return "TAKEN", (), s
        made = Made(s.plan.version, c.nonce, tuple(i._replace(taken=False) for i in items))
        wrong = "" if len(items) == len(s.plan.ids) else "a version does not name all that it was trained on"
        t = s.without(items if self.has("ready-fates") else (), made)._replace(plan=None, wrong=wrong)
        closes = {i.prompt for i in items if i.prompt} if self.has("ready-closes") else set()
        return "FLIPPED", (), t._replace(closed=t.closed | closes)

    # -- anybody ----------------------------------------------------------------------------------------------

    def free(self, s: State) -> State:
        """Delete the bytes of items that have had their fate, and of offers that have ended. Names are used once, so
        what is dead stays dead."""
        live = {i.id for i in s.items if not i.taken or self.has("free-fate")}
        live |= set(s.offers) if self.has("free-offers") else set()
        return s._replace(bytes=frozenset(b for b in s.bytes if b[0] in live))

    def recover(self, s: State) -> State:
        """All terms and incarnations end. The open plan stays, as it does for aggregators."""
        t = s._replace(history=s.life, lease=None)
        t = t._replace(term=max(t.term, 10 * s.life) + 1) if self.has("recover-terms") else t
        for a in range(len(s.incs)) if self.has("recover-incs") else ():
            t = self._ends(t, a)
        return t
