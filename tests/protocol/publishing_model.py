"""How a learner publishes versions, as a small model, explored breadth first over all interleavings.

Two publishers believe that a job is theirs. Each takes the term of every shard, loads the committed version, stages the
next one under names of its terms, opens a plan with `publish`, and says `ready` for each shard; the last call flips. A
watcher follows the differences that are staged beside each version. Leases may expire under their holders; a call may
be repeated since its reply was lost, or land a second time, late; a publisher may be killed, or its call may fail in
the middle; holders sweep; the server may be started again without its last writes.
`Publishing.broken` says what must never be. Each mutant leaves one check out, as in `model`.

A content is the number of the call that published it. A difference that is applied to another content than its base
makes `GARBAGE`; nobody sees that, as if nothing had a digest. Not here: a server's torn file, clusters, and a log so
short that a publisher does not find its own entry.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

from protocol.model import Result, explore
from protocol.publishing_scripts import (
    GARBAGE,
    IDLE,
    KEPT,
    LOAD,
    NO_FAULTS,
    PUBLISH,
    READY,
    STAGE,
    TAKE,
    Call,
    Entry,
    Faults,
    Publisher,
    Scripts,
    Staged,
    State,
    Step,
    Watcher,
    put,
)


@dataclass(frozen=True)
class Publishing:
    """A published job at small bounds: `calls` are made, by any of the publishers."""

    faults: Faults = NO_FAULTS
    without: frozenset[str] = frozenset()
    calls: int = 2
    publishers: int = 2
    shards: int = 2
    watched: bool = False

    @property
    def scripts(self) -> Scripts:
        return Scripts(self.without)

    def has(self, check: str) -> bool:
        return check not in self.without

    def start(self) -> State:
        """The first publisher holds all shards; the others have not come yet."""
        ones, zeros = (1,) * self.shards, (0,) * self.shards
        made = Entry(0, 0, zeros, zeros, 0, 0)
        blank = Publisher(zeros)
        first = blank._replace(terms=ones, loaded=made, base=zeros)
        return State(
            *((made,), None, 0, (None,) * self.shards, zeros, ones, ones),
            *(frozenset(Staged(shard, 0, 0, 0, 0) for shard in range(self.shards)), 0, 0, None),
            *((first, *[blank] * (self.publishers - 1)), Watcher(zeros, (0, zeros)) if self.watched else None),
            *(None, 0, frozenset(), self.faults),
        )

    def over(self, s: State) -> bool:
        """Whether no call is being made."""
        idle = all(p.does == IDLE for p in s.publishers) and s.history == s.life
        return idle and not (s.watcher and s.watcher.known != (s.version, s.head.terms))

    def steps(self, s: State) -> Iterator[Step]:
        """All that may happen next."""
        for a, p in enumerate(s.publishers):
            yield from self._publisher(s, a, p)
            if p.does not in (TAKE, LOAD) and p.loaded and (t := s.spending("sweeps")):
                yield from self._sweeps(t, a, p, p.loaded)
            if p.does != IDLE and (t := s.spending("kills")):
                yield Step(f"p{a} is killed", t.having(a, Publisher((0,) * self.shards)), sure=False)
            if p.does != IDLE and (t := s.spending("fails")):
                failed = p._replace(does=IDLE, content=0, done=0, plan=0, unsure=None)
                after = self._out(p) if p.does in (TAKE, LOAD) else failed
                yield Step(f"p{a}'s call fails", t.having(a, after), sure=False)
        if s.watcher:
            yield from self._watcher(s, s.watcher)
        if s.late:
            answer, _, t = self._called(s, s.late)
            yield Step(f"a late {s.late.script} lands: {answer}", t._replace(late=None))
        if s.disk:
            yield Step("the server is killed, and restarted", s.reborn(), sure=False)
        elif t := s.spending("losses"):
            yield Step("the disk has all that is written", t._replace(disk=t[:KEPT]), sure=False)
        if s.history != s.life:
            yield Step("somebody sees the restart", self.scripts.recover(s))

    # -- publishers -------------------------------------------------------------------------------------------

    def _publisher(self, s: State, a: int, p: Publisher) -> Iterator[Step]:
        """One step of a publisher."""
        if p.does == IDLE and s.calls < self.calls:
            goes_on = p.loaded and not (p.used and self.has("restages"))
            after = p._replace(does=STAGE if goes_on else TAKE, content=s.calls + 1, done=0)
            yield Step(f"p{a} is to publish c{after.content}", s._replace(calls=after.content).having(a, after), False)
        elif p.does == TAKE:
            yield from self._take(s, a, p)
        elif p.does == LOAD and s.history == s.life:
            yield self._load(s, a, p)
        elif p.does == STAGE and p.loaded:
            shard, version = p.done, p.loaded.version + 1
            base = p.base[shard] if self.has("base-published") else p.last
            new = Staged(shard, version, p.terms[shard], p.content, base)
            t = s.stored(new)
            more = shard + 1 < self.shards
            after = p._replace(used=True, does=STAGE if more else PUBLISH, done=shard + 1 if more else 0)
            yield Step(f"p{a} stages c{p.content} as {version}.{new.term} of s{shard}", t.having(a, after))
        elif p.does in (PUBLISH, READY) and p.loaded:
            term, history = p.terms[p.done], p.history
            call = Call(p.does, p.done, term, p.loaded.version + 1, p.loaded, history, p.content, p.plan)
            yield from self._calls(s, a, p, call)

    def _take(self, s: State, a: int, p: Publisher) -> Iterator[Step]:
        """Take the term of the next shard; or end the call, since another has it."""
        held = s.leases[p.done] not in (a, None)
        if held or s.history != s.life:
            yield Step(f"p{a} finds s{p.done} held, its call fails", s.having(a, self._out(p)))
        t = s.spending("takeovers") if held else s
        if not t or s.history != s.life:
            return
        t = self.scripts.acquire(t, p.done, a)
        after = p._replace(terms=put(p.terms, p.done, t.terms[p.done]), done=p.done + 1)
        if not self.has("load-early") and p.done == 0:
            after = after._replace(loaded=t.head, base=t.head.contents, history=t.history)
        if after.done == self.shards or (not self.has("take-first") and all(after.terms)):
            after = after._replace(does=LOAD, done=0)
        yield Step(f"p{a} takes term {t.terms[p.done]} of s{p.done}", t.having(a, after), not held)

    def _load(self, s: State, a: int, p: Publisher) -> Step:
        """Load what is committed. If that is what an earlier try of this call has made, the call is done."""
        made = self._made(s, *p.unsure) if p.unsure and self.has("retry-blind") else None
        after = p._replace(does=STAGE, done=0, used=False, unsure=None)
        if self.has("load-early"):
            after = after._replace(loaded=s.head, base=s.head.contents, history=s.history)
        if not self.has("load-kept") and p.loaded and p.history != s.history:
            after = after._replace(base=p.base)
        if made:
            return Step(f"p{a} finds its c{p.content} as version {made.version}", self._told(s, a, after, made.version))
        return Step(f"p{a} loads version {s.version}", s.having(a, after))

    def _calls(self, s: State, a: int, p: Publisher, call: Call) -> Iterator[Step]:
        """Call a script; go on by the answer."""
        answer, plan, t = self._called(s, call)
        about = f" for s{p.done}" if p.does == READY else ""
        label = f"p{a} says {p.does}{about}: {answer}"
        if p.terms == s.terms and p.history == s.life and answer not in ("OK", "READY", "FLIPPED", "ALREADY"):
            t = t._replace(wrong=f"a publisher in order is told {answer}")
        made = self._made(s, call.version, p.terms)
        if answer == "OK":
            yield Step(label, t.having(a, p._replace(does=READY, plan=plan)))
        elif answer == "READY" and (p.done + 1 < self.shards or self.has("ready-ends")):
            yield Step(label, t.having(a, p._replace(done=(p.done + 1) % self.shards)))
        elif answer in ("READY", "FLIPPED") or (answer == "ALREADY" and (made or not self.has("already-mine"))):
            committed = made or (t.head if answer == "FLIPPED" else call.head)
            after = p._replace(loaded=committed, base=(p.content,) * self.shards, used=False)
            yield Step(label, self._told(t, a, after, call.version))
        else:
            yield Step(f"{label}, its call fails", t.having(a, self._out(p)))
            unsure = (call.version, p.terms) if p.does == READY else p.unsure
            again = p._replace(does=TAKE, done=0, plan=0, unsure=unsure)
            yield Step(f"{label}, it takes all again", t.having(a, again), False)
        if t != s and (t := t.spending("lost")):
            yield Step(f"{label}, the reply is lost", t, sure=False)
        if not s.late and (t := s.spending("late")):
            yield Step(f"{label}, but later", t._replace(late=call), sure=False)

    def _called(self, s: State, c: Call) -> tuple[str, int, State]:
        answer, plan, t = self.scripts.publish(s, c) if c.script == PUBLISH else self.scripts.ready(s, c)
        if t != s and not t.wrong and c.history != s.life:
            t = t._replace(wrong=f"{c.script} does something on the word of an earlier run")
        if t != s and not t.wrong and c.script == PUBLISH and c.term != s.terms[0]:
            t = t._replace(wrong="a deposed publisher opens a plan")
        return answer, plan, t

    def _told(self, s: State, a: int, p: Publisher, version: int) -> State:
        """The caller is told that its content is this version."""
        after = p._replace(does=IDLE, content=0, done=0, plan=0, unsure=None)
        after = after._replace(last=0 if self.has("base-published") else p.content)
        return s._replace(told=s.told | {(p.content, version)}).having(a, after)

    def _out(self, p: Publisher) -> Publisher:
        """What is left when a call has failed since the shards are another's."""
        return Publisher((0,) * self.shards, last=p.last)

    @staticmethod
    def _made(s: State, version: int, terms: tuple[int, ...]) -> Entry | None:
        """The log's entry of a version if it was made under these terms."""
        return next((e for e in s.log if (e.version, e.terms) == (version, terms)), None)

    def _sweeps(self, s: State, a: int, p: Publisher, loaded: Entry) -> Iterator[Step]:
        """Delete what is in a shard's slot but the loaded version, the one before it, and what is staged next."""
        for shard, term in enumerate(p.terms):
            live = {(loaded.version, loaded.terms[shard]), (loaded.version + 1, term)}
            others = {b for b in s.bytes if b.shard == shard and b.version != loaded.version - 1}
            t = self.scripts.free(s, shard, p, {b for b in others if b[1:3] not in live})
            if t.bytes != s.bytes:
                yield Step(f"p{a} sweeps s{shard}", t, False)

    # -- a watcher --------------------------------------------------------------------------------------------

    def _watcher(self, s: State, w: Watcher) -> Iterator[Step]:
        """The watcher looks for a newer version, or reads a shard."""
        if w.target is None:
            if w.known != (s.version, s.head.terms):
                links = self._missing(s, w)
                yield Step("the watcher sees a version", s._replace(watcher=w._replace(target=s.head, links=links)))
            return
        if w.done and (t := s.spending("cuts")):
            known = w.known if not self.has("watch-twice") else None
            yield Step("its read is cut", t._replace(watcher=Watcher(w.contents, known)), sure=False)
        content = w.contents[w.done]
        for version, terms in w.links or ((w.target.version, w.target.terms),):
            found = s.found(w.done, version, terms[w.done])
            if not found:
                yield Step("the watcher finds nothing there", s._replace(watcher=Watcher(w.contents, None)))
                return
            content = found.content if found.base == content or not w.links else GARBAGE
        after = w._replace(contents=put(w.contents, w.done, content), done=w.done + 1)
        wrong = ""
        if after.done == self.shards:
            after = Watcher(after.contents, (w.target.version, w.target.terms))
            wrong = "" if after.contents == w.target.contents else "a watcher has something else than what it read"
        yield Step(f"the watcher reads s{w.done}", s._replace(watcher=after, wrong=wrong))

    def _missing(self, s: State, w: Watcher) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """The names of the differences that lead to the present version; none if it has to be read whole."""
        head = s.head
        if not w.known or head.version <= w.known[0]:
            return ()
        version, terms = w.known
        before = s.log[-2]
        by_number = not self.has("watch-term") and head.version == version + 1
        if by_number or w.known == (before.version, before.terms):
            return ((head.version, head.terms),)
        return tuple((v, terms) for v in range(version + 1, head.version + 1)) if terms == head.terms else ()

    # -- the judge --------------------------------------------------------------------------------------------

    def broken(self, s: State) -> str:
        """What is wrong with a state, or ""."""
        if s.wrong:
            return s.wrong
        for entry in s.log:
            if len(set(entry.contents)) > 1:
                return "a version has shards of two calls"
            if entry.contents[0] != entry.call:
                return "a version notes another call than its bytes are of"
        calls = [entry.call for entry in s.log]
        if len(set(calls)) < len(calls):
            return "a call is committed twice"
        if any(s.log[version : version + 1] != tuple(e for e in s.log if e.call == call) for call, version in s.told):
            return "a caller was told of a version that its content is not"
        if any(entry.version != number for number, entry in enumerate(s.log)):
            return "the log is no chain"
        for shard, term in enumerate(s.head.terms):
            found = s.found(shard, s.version, term)
            if not found:
                return "a shard's visible bytes were swept or never staged"
            if found.content != s.head.contents[shard]:
                return "a shard's visible bytes are not what was decided"
        w = s.watcher
        if w and w.known == (s.version, s.head.terms) and not w.target and w.contents != s.head.contents:
            return "a watcher has something else than the version that it knows"
        return ""


def explored(model: Publishing, limit: int = 5_000_000, first: bool = False) -> Result:
    """Visit all states that can be reached, as `explore` does with the model of the commit protocol."""
    return explore(cast(Any, model), limit, first)
