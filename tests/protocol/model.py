"""The commit protocol as a small model, explored breadth first over all interleavings.

    python -m protocol.model SHARDS STALENESS [MUTANT ...] [--kills N ...]

`model_scripts` has the Lua scripts; around them `Model` has what the clients do: workers that join, pull, push and
leave; aggregators that look, stage, say ready or reject; launchers that end with their workers, and others that adopt
the job. Workers may be killed, wrongly evicted, and replaced while they still run, or forked; leases may expire under
their holders; a reply may be lost, and a write of a cut connection may land late; a contribution may turn out bad; the
server may be started again without its last writes, under all of them.
With `units` workers take those one by one, leave when none is free, and join again for what comes back. With
`units_per_round` too a version is one round of them, and who finds none waits; a unit that is late is handed out a
second time.
`Model.broken` says what must never be, in any state that can be reached. Each mutant leaves one check out, so that
it is known which of them the exploration can tell from none.

Not here: time (who is silent and whose lease ran out is chance), gradients' bytes (bad is what an aggregator finds
bad), stored residuals, ranks, readers, and a `recover` so late that the server has begun another life since. A new
holder owns the slot at once and sweeps what others staged under their terms, as the design lets it. A killed
aggregator is one that never moves again.
"""

from __future__ import annotations

import argparse
import time
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from protocol.model_scripts import (
    ACTIVE,
    AGGREGATORS,
    CONTROL,
    DONE,
    FREE,
    GONE,
    MUTANTS,
    NO_FAULTS,
    PAUSED,
    PUSHED,
    RUNS,
    STOPPED,
    TAKEN,
    Adopter,
    Entry,
    Faults,
    Holder,
    Plan,
    Remover,
    Scripts,
    Session,
    Staged,
    State,
    Step,
    entry_of,
    put,
)

from kvps.config import JobConfig
from kvps.staleness import ASP, admits


@dataclass(frozen=True)
class Model:
    """A job at small bounds. `max_pending` 0 is what a job would choose; `joined` begins with all workers there.

    Each worker does `rounds`; or they share `units`, if there are any. With `fixed` so many divide the data among
    themselves, and the others come in vain.
    """

    shards: int = 1
    staleness: int = 0
    faults: Faults = NO_FAULTS
    without: frozenset[str] = frozenset()
    rounds: int = 2
    workers: int = 2
    max_pending: int = 0
    joined: bool = True
    units: int = 0
    quorum: int = 0
    drops: bool = False
    units_per_round: int = 0
    states: bool = False
    fixed: int = 0
    scripts: Scripts = field(init=False)

    def __post_init__(self) -> None:
        limit = self.max_pending or JobConfig(staleness=self.staleness).max_pending
        if self.units_per_round:
            limit = self.units_per_round * (self.staleness + 1)
        sizes = (self.quorum, self.drops, self.units_per_round, self.states, self.fixed)
        scripts = Scripts(self.staleness, limit, self.without, self.clustered, *sizes)
        object.__setattr__(self, "scripts", scripts)

    @property
    def clustered(self) -> bool:
        """Whether control and each shard's bytes are on servers of their own, which fail over alone."""
        return self.faults.failovers > 0

    def start(self) -> State:
        """The aggregators hold the shards in turn, each under its first term."""
        holders = [[Holder(1, (), 0) if shard % 2 == a else None for shard in range(self.shards)] for a in AGGREGATORS]
        s = State(
            *((), (0,) * self.workers, (None,) * self.workers, (), None, 0, (None,) * self.shards),
            *(tuple(shard % 2 for shard in range(self.shards)), *((1,) * self.shards,) * 2, (0,) * self.shards),
            frozenset(Staged(shard, 0, 0, ()) for shard in range(self.shards)),
            *((FREE,) * self.units, 0, frozenset(), frozenset(), 1, 0),
            *((RUNS, 0), ((0, 0),) * self.workers, frozenset(), 0, 0, None, False),
            *((None,) * self.workers, None, tuple(map(tuple, holders)), None, (), None, (), None, frozenset()),
            *(self.faults, ""),
        )
        for worker in range((self.fixed or self.workers) if self.joined else 0):
            s = next(step.state for step in self._membership(s, worker))
        return s

    def over(self, s: State) -> bool:
        """Whether all is committed or rejected, and every worker has finished or is gone for good."""
        undone = set(s.units) - {DONE} and s.run[0] != STOPPED
        left = s.inbox or s.plan or any(s.sessions) or undone or s.history != s.life or s.removers
        return not left and self.scripts.all_joined(s) and all(e is None or e.state == GONE for e in s.entries)

    def steps(self, s: State) -> Iterator[Step]:
        """All that may happen next."""
        for step in self._steps(s):
            t = step.state
            if s.torn and t.torn and t.life == s.life and t.control != s.control:
                step = step._replace(state=t._replace(wrong="a script writes behind half a transaction"))
            yield step
        if s.torn:
            yield Step("the server has written its file anew", s._replace(torn=False))

    def _steps(self, s: State) -> Iterator[Step]:
        yield from self._removal(s)
        if s.stale:
            yield from self._stale(s, *s.stale)
        if not s.job:
            return
        _, t = self.scripts.plan(s)
        if t != s and t.plan:
            if self.quorum and len(t.plan.contributions) < self.scripts.wanted(s):
                t = t._replace(wrong="a version is made of less than its quorum")
            if s.run[0] == PAUSED:
                t = t._replace(wrong="a plan is opened while the job is paused")
            yield Step(f"{t.plan} of version {s.version + 1} is opened", t)
        yield from self._control(s)
        yield from self._adoption(s)
        for worker in range(self.workers):
            yield from self._membership(s, worker)
            if session := s.sessions[worker]:
                yield from self._session(s, worker, session, zombie=False)
        if s.zombie:
            yield from self._session(s, *s.zombie, zombie=True)
        for aggregator in AGGREGATORS:
            for shard in range(self.shards):
                yield from self._holder(s, aggregator, shard)
        if s.late:
            t = s.stored(s.late) if s.late.version >= s.version else s
            yield Step(f"a late write of {s.late.version}.{s.late.term} lands", t._replace(late=None))
        if s.disk:
            yield Step("the server is killed, and restarted", s.reborn(), sure=False)
        elif t := s.spending("losses"):
            yield Step("the disk has all that is written", t.saved(), sure=False)
        yield from self._failovers(s)
        if s.history != s.life and self._may_recover(s):
            yield Step("somebody sees the restart", self.scripts.recover(s)[1])

    def _control(self, s: State) -> Iterator[Step]:
        """Somebody stops the job, or pauses it for a while."""
        state, _ = s.run
        if state != STOPPED and (t := s.spending("stops")):
            t = self.scripts.stop(t)[1]
            if t.run != s.run and s.history != s.life:
                t = t._replace(wrong="a job is stopped on the word of an earlier run")
            yield Step(f"the job is stopped: all end with round {t.run[1]}", t, sure=False)
        if state == PAUSED:
            yield Step("the job goes on", s._replace(run=(RUNS, 0)))
        elif state == RUNS and (t := s.spending("pauses")):
            yield Step("the job is paused", t._replace(run=(PAUSED, 0)), sure=False)

    def _adoption(self, s: State) -> Iterator[Step]:
        """The launcher ends with all its workers, somebody finds that out, and takes its place as late as may be."""
        for number, adopter in enumerate(s.adopters):
            (answer, *_), t = self.scripts.adopt(s, adopter)
            others = (*s.adopters[:number], *s.adopters[number + 1 :])
            if t != s and s.history != s.life:
                t = t._replace(wrong="a job is adopted on the word of an earlier run")
            if answer == "OK" and s.launcher not in (adopter.before, adopter.me):
                t = t._replace(wrong="a job has two launchers")
            if answer == "OTHER" and s.launcher == adopter.me:
                t = t._replace(wrong="a launcher is not told that the job is its own")
            if wrong := self._wrongly_adopted(s, t):
                t = t._replace(wrong=wrong)
            label = f"launcher {adopter.me} takes the job: {answer}"
            again = self._noticed(t, answer)
            yield Step(label, again if answer == "RESTARTED" else t._replace(adopters=others))
            if t != s and (t := t.spending("lost")):
                yield Step(f"{label}, the reply is lost", t, sure=False)
        if t := s.spending("adoptions"):
            me = max([s.launcher, *(adopter.me for adopter in s.adopters)]) + 1
            ended = tuple((worker, entry.incarnation) for worker, entry in enumerate(s.entries) if entry)
            adopters = (*s.adopters, Adopter(me, s.launcher, ended))
            t = t._replace(sessions=(None,) * self.workers, adopters=adopters)
            yield Step(f"the launcher ends with all its workers, and {me} finds that out", t, sure=False)

    @staticmethod
    def _wrongly_adopted(s: State, t: State) -> str:
        """What is wrong with what happened to the workers of a job that was adopted, or ""."""
        for session, before, after in zip(s.sessions, s.entries, t.entries, strict=True):
            if before and after and before != after:
                if before.finished:
                    return "the others wait for a worker that has finished"
                if session and session.incarnation == before.incarnation and before.state == ACTIVE:
                    return "a worker that lives is taken for one that has ended"
        return ""

    def _failovers(self, s: State) -> Iterator[Step]:
        """A replica lags, catches up, or takes the place of its master without the last writes."""
        if s.replica:
            yield Step("the replica catches up", s._replace(replica=None))
            yield Step(f"the server of {s.replica[0]} fails over", s.failed_over(), sure=False)
        elif t := s.spending("failovers"):
            for place in (CONTROL, *range(self.shards)):
                yield Step(f"the replica of {place} has all that is written", t.lagging(place), sure=False)

    # -- removal ----------------------------------------------------------------------------------------------

    def _removal(self, s: State) -> Iterator[Step]:
        """Somebody removes the job, as slowly as may be; and another one is made under its name."""
        for number, remover in enumerate(s.removers):
            others = (*s.removers[:number], *s.removers[number + 1 :])
            if remover.does == "remove":
                (answer,), t = self.scripts.remove(s, remover.job)
                if answer == "OK" and s.job != remover.job:
                    t = t._replace(wrong="another job than was meant is removed")
                goes_on = (remover._replace(does="unlink"),) if answer == "OK" else ()
                yield Step(f"job {remover.job} is removed: {answer}", t._replace(removers=(*others, *goes_on)))
            elif remover.does == "unlink":
                any_job = "remove-bytes" in self.scripts.without
                keeps = frozenset(b for b in s.bytes if b.job != remover.job and not any_job)
                t = s._replace(bytes=keeps, removers=(*others, remover._replace(does="forget")))
                yield Step(f"the bytes of job {remover.job} are unlinked", t)
            else:
                _, t = self.scripts.forget(s, remover.job)
                yield Step(f"the name of job {remover.job} is freed", t._replace(removers=others))
        if (s.job or s.removed) and (t := s.spending("removals")):
            begins = Remover(s.job, "remove") if s.job else Remover(s.removed, "unlink")
            yield Step(f"somebody begins to remove job {begins.job}", t._replace(removers=(*s.removers, begins)), False)
        if not s.job and not s.removed and s.stale:
            job = s.stale.job + 1
            staged = frozenset(Staged(shard, 0, 0, (), job) for shard in range(self.shards))
            yield Step(f"job {job} is made", s._replace(job=job, bytes=s.bytes | staged))

    def _stale(
        self, s: State, job: int, sessions: Sequence[Session | None], holders: Sequence[Sequence[Holder | None]]
    ) -> Iterator[Step]:
        """Whatever processes do that still hold an earlier job, which must change nothing."""
        does: list[tuple[str, State]] = []
        for worker, session in enumerate(sessions):
            does.append((f"join of w{worker}", self.scripts.join(s, worker, job)[1]))
            if s.job and s.entries[worker]:
                does.append((f"evict of w{worker}", self.scripts.evict(s, worker, job)[1]))
            if session:
                does.append((f"push of w{worker}", self.scripts.push(s, worker, session, job=job)[1]))
                does.append((f"leave of w{worker}", self.scripts.leave(s, worker, session.incarnation, job=job)[1]))
                does.append((f"take of w{worker}", self.scripts.take(s, worker, session.incarnation, job)[1]))
        does.append(("plan", self.scripts.plan(s, job)[1]))
        does += [("stop", self.scripts.stop(s, job)[1])] if s.faults.stops else []
        if s.faults.adoptions:
            ended = tuple((worker, session.incarnation) for worker, session in enumerate(sessions) if session)
            does.append(("adopt", self.scripts.adopt(s, Adopter(s.launcher + 1, s.launcher, ended), job)[1]))
        does.append(("recover", self.scripts.recover(s, job)[1]))
        for aggregator, held in enumerate(holders):
            for shard, holder in enumerate(held):
                does.append((f"acquire of a{aggregator}", self.scripts.acquire(s, shard, aggregator, False, job)[1]))
                if holder and (plan := holder.staged or holder.plan):
                    digest = (*holder.weights, plan.mark)
                    does.append(("ready", self.scripts.ready(s, shard, holder.term, plan, digest, job)[1]))
                    bad = plan.contributions[0] if plan.contributions else None
                    if bad:
                        does.append(("reject", self.scripts.reject(s, shard, holder.term, plan, bad, job)[1]))
        for what, t in does:
            if t != s:
                yield Step(f"{what} for job {job}", t._replace(wrong="a script does something for an earlier job"))

    # -- workers ----------------------------------------------------------------------------------------------

    def _membership(self, s: State, worker: int) -> Iterator[Step]:
        """A worker comes, is replaced, is killed, is thought gone."""
        entry, session = s.entries[worker], s.sessions[worker]
        active = entry is not None and entry.state == ACTIVE
        left = FREE in s.units and not (entry and self._has_ended(s, worker, entry))  # units that nobody has taken
        more = left or active if self.units and entry else not (entry and entry.finished)
        if not (active or s.zombie) if session else more:
            answer, t = self.scripts.join(s, worker)
            if answer[0] == "OK":
                _, life, round_, kept = answer
                if self.states and kept != self._state_after(s, worker, entry.pending if entry else 0):
                    t = t._replace(wrong="a worker that joins gets a state that is not as old as its clock")
                does = "take" if self.units else "pull"
                begun = Session(life, 0, round_, does, state=kept)
                t = t._replace(sessions=put(s.sessions, worker, begun))
                if session and (session.does != "pull" or self._ends(s, session)):  # else it sees that it is out
                    t = t._replace(zombie=(worker, session))
                yield Step(f"w{worker} joins as .{life} at round {round_}", t, sure=entry is None or bool(self.units))
        if session and (t := s.spending("kills")):
            yield Step(f"w{worker} is killed", t._replace(sessions=put(s.sessions, worker, None)), sure=False)
            if entry and self.units:
                t = self.scripts.leave(t, worker, session.incarnation, finished=False)[1]
                t = t._replace(sessions=put(s.sessions, worker, None))
                yield Step(f"w{worker} fails, and leaves", t, sure=False)
        if session and not s.zombie and (t := s.spending("forks")):
            if "session-fork" in self.without:
                t = t._replace(zombie=(worker, session))
            yield Step(f"w{worker} is forked", t, sure=False)
        if entry and entry.counts and not (session and active):
            yield Step(f"w{worker} is evicted", self.scripts.evict(s, worker)[1])
        elif active and (t := s.spending("evictions")):
            yield Step(f"w{worker} is evicted though it lives", self.scripts.evict(t, worker)[1], sure=False)

    def _session(self, s: State, worker: int, session: Session, zombie: bool) -> Iterator[Step]:
        """A worker's process takes, leaves, pulls, pushes or asks."""
        who, entry = f"w{worker}.{session.incarnation}", s.entries[worker]

        def then(t: State, after: Session | None) -> State:
            if zombie:
                return t._replace(zombie=(worker, after) if after else None)
            return t._replace(sessions=put(t.sessions, worker, after))

        if session.does == "leave" or (session.does == "pull" and self._ends(s, session)):
            (answer, *_), t = self.scripts.leave(s, worker, session.incarnation)
            if answer == "NOJOB" or (answer == "OK" and self._undone(t, worker, session)):
                t = t._replace(wrong="who leaves is not told that its rounds are lost")
            yield Step(f"{who} leaves: {answer}", then(self._noticed(t, answer), None))
        elif session.does == "take":
            (answer, *got), t = self.scripts.take(s, worker, session.incarnation)
            after = None if answer in ("EVICTED", "RESTARTED") else session._replace(does="leave")
            if answer == "OK":
                after = session._replace(does="push" if self._has_weights(session, *got) else "pull", unit=got[0])
            elif answer == "NONE" and self.units_per_round:
                after = session  # it waits for the next version, or for a unit that comes back
            yield Step(f"{who} takes: {answer} {got}", then(self._noticed(t, answer), after))
            if answer == "NONE" and (spent := s.spending("backups")):
                (answer, *got), t = self.scripts.take(spent, worker, session.incarnation, late=True)
                if answer == "OK":
                    yield Step(f"{who} takes {got} too", then(t, session._replace(does="pull", unit=got[0])), False)
            if t != s and (t := t.spending("lost")):
                yield Step(f"{who} takes, the reply is lost", t, sure=False)
        elif session.does == "pull" and not self._is_in(entry, session):
            yield Step(f"{who} sees that it is out", then(s, None))
        elif session.does == "pull":
            if self._admits(s, worker, session):
                if self.scripts.partial and "session-round" not in self.without:
                    session = session._replace(round=max(session.round, s.version))
                    if session.round >= self.rounds and not self.units:
                        yield Step(f"{who} sees that the job's rounds are over", then(s, session))
                        return
                base = s.version if self.faults.losses or self.scripts.partial or self.units_per_round else 0
                read = session._replace(does="push", history=s.history, base=base)
                t = then(s, read)._replace(wrong=self._judged(s, worker, session))
                yield Step(f"{who} pulls version {s.version} for round {session.round + 1}", t)
        else:
            answer, t = self.scripts.push(s, worker, session)
            if t != s and session.history != s.life:
                t = t._replace(wrong="a contribution is accepted on the word of an earlier run")
            if t != s and entry and entry.unit != session.unit:
                t = t._replace(wrong="a contribution is accepted as of another unit than it was computed on")
            if answer[0] == "ACK" and session.does == "push" and entry and entry.accepted > session.seq:
                t = t._replace(wrong="a gradient is acknowledged in the place of another")
            counts = (worker, session.incarnation, session.seq + 1) in {c[:3] for c in t.accepted}
            if answer[0] == "STOPPED" and counts:
                t = t._replace(wrong="a worker is told that the job has stopped without a contribution that counts")
            told = answer[0] in ("ACK", "LATE", "DUPLICATE")
            if (self.drops or self.units_per_round) and told and counts != (answer[0] == "ACK"):
                t = t._replace(wrong="a worker is not told the truth about a contribution that came late")
            match answer:
                case ("ACK", _) if not self._is_safe(t, CONTROL, "push-synced"):
                    yield Step(f"{who} pushes, and waits for the replica", then(t, session._replace(does="ask")))
                case ("ACK", round_):
                    t = self._promised(t, worker, session)
                    does = "take" if self.units else "pull"
                    after = Session(session.incarnation, session.seq + 1, round_, does)
                    after = after._replace(state=self.scripts.state_at(session))
                    if self.units_per_round:  # it keeps the weights for another unit of the same round
                        after = after._replace(history=session.history, base=session.base)
                    yield Step(f"{who} pushes round {round_}", then(t, after))
                case ("LATE",):
                    closed = session.base + 1
                    after = session._replace(seq=session.seq + 1, does="pull", round=closed, history=0, base=0)
                    yield Step(f"{who} pushes too late", then(t, after))
                case ("DUPLICATE",):
                    after = Session(session.incarnation, session.seq + 1, session.round, "take")
                    after = after._replace(state=session.state)
                    yield Step(f"{who} pushes a unit that another has pushed", then(t, after))
                case ("STOPPED",):
                    yield Step(f"{who} pushes behind the last round", then(t, session._replace(does="leave")))
                case ("SEQUENCE",) if s.life == 0:
                    yield Step(f"{who} pushes", s._replace(wrong="a worker in order is told SEQUENCE"))
                case ("UNIT" | "HISTORY" | "BASE",) if s.life == 0:
                    yield Step(f"{who} pushes", s._replace(wrong=f"a worker in order is told {answer[0]}"))
                case ("EVICTED" | "SEQUENCE" | "RESTARTED" | "HISTORY" | "BASE" | "UNIT",):
                    yield Step(f"{who} may not push: {answer[0]}", then(self._noticed(t, answer[0]), None))
            if t != s and (t := t.spending("lost")):
                yield Step(f"{who} pushes, the reply is lost", then(t, session._replace(does="ask")), sure=False)
            if session.does == "ask":  # it may also push again blindly, as above
                answer, _ = self.scripts.push(s, worker, session, ask=True)
                if answer == ("NEW",):
                    yield Step(f"{who} asks: {answer[0]}", then(s, session._replace(does="push")))

    def _ends(self, s: State, session: Session) -> bool:
        """Whether a session that would pull has no round to do any more."""
        over = not self.units and session.round >= self.rounds
        return over or (not self.units_per_round and self.scripts.is_last(s, session.round))

    def _has_ended(self, s: State, worker: int, entry: Entry) -> bool:
        """Whether a worker of a stopped job gets no unit any more."""
        return self.scripts.is_last(s, s.version if self.units_per_round else self.scripts.done(s, worker, entry))

    def _has_weights(self, session: Session, unit: int) -> bool:
        """Whether it computes a unit on the weights that it has already: in BSP those of the unit's round."""
        if not self.units_per_round or self.staleness or not session.seq:
            return False
        return session.base == self.scripts.round_of(unit) or "session-cached" in self.without

    def _promised(self, s: State, worker: int, session: Session) -> State:
        """The worker knows that its contribution counts."""
        told = {(worker, session.incarnation, session.seq + 1)} if self.clustered else frozenset[tuple[int, int, int]]()
        return s._replace(promised=s.promised | told)

    def _is_in(self, entry: Entry | None, session: Session) -> bool:
        """Whether the session finds itself in the clock, with all that it was told was accepted."""
        if not entry or entry.incarnation != session.incarnation or entry.state != ACTIVE:
            return False
        return entry.accepted >= session.seq or "session-forgotten" in self.without

    def _noticed(self, s: State, answer: str) -> State:
        """Who is told of a restart has a new history begun."""
        return self.scripts.recover(s)[1] if answer == "RESTARTED" and self._may_recover(s) else s

    def _may_recover(self, s: State) -> bool:
        return not s.torn or "recover-whole" in self.without

    def _undone(self, s: State, worker: int, session: Session) -> bool:
        """Whether the worker has rounds to do, as far as the server knows, and no later process does them."""
        entry = entry_of(s, worker)
        done = self.scripts.done(s, worker, entry)
        if self.scripts.partial:  # rounds are the job's
            done = max(done, s.version + bool(s.plan))
        over = done >= self.rounds or self.scripts.is_last(s, done)
        return not self.units and not over and entry.incarnation <= session.incarnation

    def _admits(self, s: State, worker: int, session: Session) -> bool:
        """Whether the session may compute its next round on the present version."""
        if self.units_per_round:
            return True  # no unit is handed out before its round is open
        if self.scripts.partial:
            committed = not entry_of(s, worker).pending or "session-own" in self.without
            return committed and (s.version >= session.round or "session-dropped" in self.without)
        committed_rounds = [s.clock[w] + e.skip for w, e in enumerate(s.entries) if e and e.state != GONE]
        return admits(session.round, committed_rounds, self.staleness) or "session-bound" in self.without

    def _judged(self, s: State, worker: int, session: Session) -> str:
        """What is wrong if a worker computes its next round on these weights."""
        done = session.round
        if self.units_per_round:
            return ""  # the log is judged
        if self.scripts.partial:
            if any(c.worker == worker for c in s.inbox):
                return "a round is computed on weights without the worker's own last round"
            return "a round is computed on the version that it came too late for" if s.version < done else ""
        if self.staleness == 0 and s.version != done:
            return "BSP: a round is computed on another version than that of the last round"
        for worker, entry in enumerate(s.entries):
            if self.staleness == ASP or not entry or entry.state == GONE:
                continue
            missing = [c.round for c in s.inbox if c.worker == worker]
            if entry.counts:
                missing.append(s.clock[worker] + entry.skip + entry.pending + 1)
            if any(round_ <= done - self.staleness for round_ in missing):
                return "a round is computed on weights that do not hold what the bound asks for"
        return ""

    # -- aggregators ------------------------------------------------------------------------------------------

    def _holder(self, s: State, a: int, shard: int) -> Iterator[Step]:
        """One step of an aggregator with one shard."""
        holder, who = s.holders[a][shard], f"a{a}/s{shard}"
        if holder is None:
            term, t, sure = self._take(s, a, shard)
            if term and not self._is_safe(t, shard, "own-synced"):
                yield Step(f"{who} takes term {term}, and waits for the replica", t, sure)
                return
            found = [b.weights for b in s.bytes if b[:3] == (shard, s.version, s.names[shard]) and b.job == s.job]
            if term and found:  # if they are not there, `broken` says so
                yield Step(f"{who} takes term {term}", self._held(t, a, shard, Holder(term, found[0], s.history)), sure)
            return
        _, t = self.scripts.free(s, shard, holder)
        if t != s and (self.clustered or (holder.term, holder.history) != (s.owners[shard], s.life)):
            yield Step(f"{who} frees what it does not know", t)
        version = len(holder.weights)
        if self.clustered and holder.synced < version <= s.version and holder.history == s.life and s.synced(CONTROL):
            t = self._held(s, a, shard, holder._replace(synced=version))
            yield Step(f"{who} sees that the replica of control has version {version}", t)
        if holder.history != s.history:
            yield Step(f"{who} sees the restart", self._held(s, a, shard, None))
        if holder.does == "look":
            if s.plan is None or holder.staged == s.plan:
                return  # it may settle later: without a plan to do it comes to the same
            settled = self._settled(s, shard, holder)
            if settled is None:
                yield Step(f"{who} has old weights", self._held(s, a, shard, None))
            elif settled.staged and "holder-restages" not in self.without:
                after = settled._replace(does="retake", plan=s.plan)
                yield Step(f"{who} sees {s.plan}, needs a new term", self._held(s, a, shard, after))
            else:
                yield from self._stage(s, a, shard, settled, s.plan)
        elif holder.does == "retake" and holder.plan:
            term, t, sure = self._take(s, a, shard)
            if term and not self._is_safe(t, shard, "own-synced"):
                term = 0
            if not term or not sure:
                yield Step(f"{who} has lost the lease", self._held(s, a, shard, None))
            known = any(
                b[1:] == (t.version, t.names[shard], holder.weights, t.job) for b in t.bytes if b.shard == shard
            )
            if term and "holder-retakes" not in self.without and not known:
                yield Step(f"{who} takes term {term}, has old weights", self._held(t, a, shard, None), sure)
            elif term:
                staged = holder.staged if "holder-retakes" in self.without else None
                again = holder._replace(term=term, staged=staged, history=s.history)
                for step in self._stage(t, a, shard, again, holder.plan):
                    yield step._replace(label=f"{who} takes term {term}; {step.label}", sure=step.sure and sure)
        elif holder.does == "say" and holder.staged:
            yield from self._say(s, a, shard, holder, holder.staged)
        elif holder.does == "reject" and holder.plan and holder.bad:
            for again in (False, True) if self.units_per_round else (False,):
                (answer, *_), t = self.scripts.reject(s, shard, holder.term, holder.plan, holder.bad, again=again)
                label = f"{who} rejects w{holder.bad.worker}:{holder.bad.round} of {holder.plan}: {answer}"
                label += ", and it is computed again" * again
                yield Step(label, self._held(t, a, shard, holder._replace(does="look", plan=None, bad=None)))
                if t != s and (t := t.spending("lost")):
                    yield Step(f"{label}, the reply is lost", t, sure=False)

    def _take(self, s: State, a: int, shard: int) -> tuple[int, State, bool]:
        """A new term, or 0; and whether no lease had to expire for it."""
        answer, t = self.scripts.acquire(s, shard, a, expired=False)
        if answer[0] == "HELD" and (spent := s.spending("takeovers")):
            answer, t = self.scripts.acquire(spent, shard, a, expired=True)
        return (answer[1] if answer[0] == "OK" else 0), t, s.leases[shard] in (a, None)

    def _settled(self, s: State, shard: int, holder: Holder) -> Holder | None:
        """What it staged it takes for committed once the version is; with older weights it drops the shard."""
        named = holder.term == s.names[shard] or "holder-names" in self.without
        if holder.staged and holder.staged.version == s.version and named:
            holder = holder._replace(weights=(*holder.weights, holder.staged.mark), staged=None)
        return None if len(holder.weights) != s.version and "holder-stale" not in self.without else holder

    def _stage(self, s: State, a: int, shard: int, holder: Holder, plan: Plan) -> Iterator[Step]:
        """Compute and store the plan's version, or find that it cannot be computed."""
        staged = Staged(shard, plan.version, holder.term, (*holder.weights, plan.mark), s.job)
        t = self._held(s.stored(staged), a, shard, holder._replace(staged=plan, does="say", plan=None))
        label = f"a{a}/s{shard} stages {plan} as {staged.version}.{staged.term}"
        if not self._is_safe(t, shard, "stage-synced"):
            yield Step(f"{label}, and waits for the replica", s.stored(staged))
            return
        yield Step(label, t)
        if not s.late and (t := t.spending("late")):
            yield Step(f"{label}, twice since its link is cut", t._replace(late=staged), sure=False)
        if t := s.spending("bad"):
            for bad in plan.contributions:
                after = holder._replace(does="reject", plan=plan, bad=bad)
                label = f"a{a}/s{shard} finds w{bad.worker}:{bad.round} of {plan} bad"
                yield Step(label, self._held(t, a, shard, after), sure=False)

    def _say(self, s: State, a: int, shard: int, holder: Holder, plan: Plan) -> Iterator[Step]:
        """Say ready; go on by the answer."""
        (answer, *_), t = self.scripts.ready(s, shard, holder.term, plan, (*holder.weights, plan.mark))
        label = f"a{a}/s{shard} says ready for {plan}: {answer}"
        after: Holder | None = holder._replace(does="look")
        if answer == "FLIPPED":
            after = self._settled(t, shard, holder._replace(does="look"))
        if answer in ("TERM", "RESTARTED"):
            after = None
        if t != s and holder.history != s.life:
            t = t._replace(wrong="a shard is ready on the word of an earlier run")
        t = self._noticed(t, answer)
        if answer == "DIGEST":
            t = t._replace(wrong="a holder in order is told DIGEST")
        yield Step(label, self._held(t, a, shard, after))
        if t != s and (t := t.spending("lost")):
            yield Step(f"{label}, the reply is lost", t, sure=False)

    def _is_safe(self, s: State, place: int, check: str) -> bool:
        """Whether a failover of a place would lose nothing that is there now, or nobody asks."""
        return s.synced(place) or check in self.without

    def _held(self, s: State, a: int, shard: int, holder: Holder | None) -> State:
        return s._replace(holders=put(s.holders, a, put(s.holders[a], shard, holder)))

    # -- the judge --------------------------------------------------------------------------------------------

    def broken(self, s: State) -> str:
        """What is wrong with a state, or ""."""
        if s.wrong or not s.job:
            return s.wrong
        committed = [c for plan in s.log for c in plan.contributions]
        places = [*committed, *s.inbox, *s.rejected]
        if not s.promised.issubset(c[:3] for c in places):
            return "a failover has lost a contribution whose worker was told"
        if not s.accepted.issubset(places):
            return "an acknowledged contribution is lost"
        if len({c[:3] for c in places}) < len(places):
            return "a contribution is there twice"
        if len({(c.worker, c.round) for c in places}) < len(places):
            return "a worker has two contributions for one round"
        done, waiting = Counter(c.worker for c in committed), Counter(c.worker for c in s.inbox)
        waiting.update(c.worker for c in (s.plan.over if s.plan else ()))
        for worker, entry in enumerate(s.entries):
            if s.clock[worker] != done[worker]:
                return "a clock is not the count of commits"
            if (entry.pending if entry else 0) != waiting[worker]:
                return "pending is not the count of what waits"
            if entry and entry.pending > self.scripts.max_pending:
                return "more than max_pending wait"
            if entry and entry.state == GONE and entry.pending:
                return "a worker is gone though its contributions wait"
        if wrong := self._units_broken(s) or self._rounds_broken(s) or self._stop_broken(s) or self._states_broken(s):
            return wrong
        spent = self.faults.kills - s.faults.kills + self.faults.evictions - s.faults.evictions
        spent += (self.faults.adoptions - s.faults.adoptions) * self.workers
        alone = not self.units and not s.life and s.job == 1
        if alone and sum(entry.incarnation - 1 for entry in s.entries if entry) > spent:
            return "a worker was put out though no fault did it"
        if self.fixed and sum(e is not None for e in s.entries) > self.fixed:
            return "one worker more has joined than divide the data among themselves"
        if s.log and not self.scripts.all_joined(s) and s.run[0] != STOPPED:
            return "a version is committed before all workers have joined"
        if self.drops and any(c.base != plan.version - 1 for plan in s.log for c in plan.contributions):
            return "a contribution counts that came late"
        if self.scripts.partial and any(c.round > plan.version for plan in s.log for c in plan.contributions):
            return "a contribution is of a round that the job has not come to"
        if self.drops and self.scripts.partial:
            if any(c.round != plan.version for plan in s.log for c in plan.contributions):
                return "a contribution is of another round than its version"
            if not self.units and s.version > self.rounds:
                return "a version is made after the job's last round"
        if any(after.head != plan.mark for plan, after in zip(s.log, s.log[1:], strict=False)):
            return "the log is no chain"
        decided = tuple(plan.mark for plan in s.log)
        for shard, term in enumerate(s.names):
            visible = [b.weights for b in s.bytes if b[:3] == (shard, s.version, term) and b.job == s.job]
            if not visible:
                return "a shard's visible bytes were swept or never staged"
            if visible[0] != decided:
                return "a shard's visible bytes are not what was decided"
        return ""

    def _units_broken(self, s: State) -> str:
        """What is wrong with where units are, or ""."""
        over_for_good = [c for plan in s.log for c in plan.over] if self.units_per_round else []
        done = Counter(c.unit for c in (*over_for_good, *(c for plan in s.log for c in plan.contributions)))
        waiting = Counter(c.unit for c in (*s.inbox, *(s.plan.over if s.plan else ())))
        for unit, is_ in enumerate(s.units):
            has = [PUSHED] * waiting[unit] + [DONE] * done[unit]
            taken = [TAKEN for e in s.entries if e and e.counts and e.unit == unit]
            if not self.units_per_round:
                has += taken
            elif not has:  # a second worker may compute it; and it may go on when the first has pushed
                has = taken[:1]
            if has.count(DONE) > 1:
                return "a unit is in two commits"
            if has != [is_] and (has, is_) != ([], FREE):
                return "a unit is lost, or there twice"
        return ""

    def _state_after(self, s: State, worker: int, pending: int = 0) -> tuple[int, int]:
        """What the worker's user kept with as many contributions as its clock counts, and so many of those that wait.
        What was rejected from the open plan waits until that is committed."""
        gone = s.rejected - set(s.plan.over if s.plan else ())
        pushed = sorted(c for c in s.accepted - gone if c.worker == worker)
        counted = s.clock[worker] + pending
        return pushed[counted - 1].state if counted else (0, 0)

    def _states_broken(self, s: State) -> str:
        """What is wrong with the states of workers, or ""."""
        for worker, state in enumerate(s.states if self.states else ()):
            if state != self._state_after(s, worker):
                return "a committed state is not as old as its worker's clock"
        for worker, round_, _ in s.noted:
            entry = entry_of(s, worker)
            if not entry.pending >= round_ - s.clock[worker] - entry.skip - 1 >= 0:
                return "a state waits for no contribution"
        return ""

    def _stop_broken(self, s: State) -> str:
        """What is wrong with how a stopped job ends, or ""."""
        state, last = s.run
        if state != STOPPED or self.staleness == ASP:
            return ""
        if not self.units_per_round and any(c.round > last for c in s.accepted):
            return "a contribution is accepted behind the last round"
        by_versions = self.staleness == 0 or self.units_per_round
        if by_versions and s.version > last:
            return "a version is made behind the last one"
        if self.over(s) and by_versions and s.version != last and any(e and e.finished for e in s.entries):
            return "a stopped job ends with another version than its last one"
        for worker, entry in enumerate(s.entries):
            done = entry and s.clock[worker] + entry.skip
            if self.over(s) and entry and entry.finished and not by_versions and done != last:
                return "a worker ends with another round than the last one"
        return ""

    def _rounds_broken(self, s: State) -> str:
        """What is wrong with the versions that are made of rounds of units, or ""."""
        for plan in s.log if self.units_per_round else ():
            wanted = self.scripts.units_of(s, plan.version - 1)
            if [c.unit for c in plan.contributions] != sorted(c.unit for c in plan.contributions if c.unit is not None):
                return "a version has its units in another order"
            if {c.unit for c in (*plan.contributions, *plan.over)} != set(wanted):
                return "a version is not made of the units of its round"
            if not all(c.unit is not None and self.scripts.fits_unit(c.unit, c.base) for c in plan.contributions):
                return "a unit is computed on a version that the bound does not allow"
        return ""


@dataclass
class Result:
    """What an exploration found: of each thing that must not be the shortest schedule, a step a line."""

    states: int
    complete: bool
    found: dict[str, list[str]]


def explore(model: Model, limit: int = 5_000_000, first: bool = False) -> Result:
    """Visit all states that can be reached, at most `limit`; with `first` only until one is broken.

    Behind a broken state nothing is looked at. If there is none, the job must be able to end from every state
    without one more fault, and without anybody coming back.
    """
    states = [model.start()]
    numbers = {states[0]: 0}
    parents, sources, targets, ends = array("l", [0]), array("l"), array("l"), bytearray(1)
    found: dict[str, list[str]] = {}

    def schedule(number: int) -> list[str]:
        lines = []
        while number:
            before, state = parents[number], states[number]
            lines.append(next(step.label for step in model.steps(states[before]) if step.state == state))
            number = before
        return lines[::-1]

    for number, state in enumerate(states):  # which grows meanwhile
        if wrong := model.broken(state):
            if wrong not in found:
                found[wrong] = schedule(number)
            if first:
                return Result(len(states), False, found)
            continue
        ends[number] = model.over(state)
        for step in model.steps(state):
            target = numbers.setdefault(step.state, len(states))
            if target == len(states):
                states.append(step.state)
                parents.append(number)
                ends.append(0)
            if step.sure:
                sources.append(number)
                targets.append(target)
        if len(states) > limit:
            return Result(len(states), False, found)

    more = not found
    while more:
        more = False
        for source, target in zip(reversed(sources), reversed(targets), strict=True):
            if ends[target] and not ends[source]:
                ends[source] = more = True
    if not found and 0 in ends:
        found["the job cannot end"] = schedule(ends.index(0))
    return Result(len(states), True, found)


def main(arguments: Sequence[str] | None = None) -> int:
    """Explore one setting; returns how many things were found that must not be."""
    parser = argparse.ArgumentParser(description="Explore the commit protocol and say what must not be.")
    parser.add_argument("shards", type=int)
    parser.add_argument("staleness", type=int, help="-1 is ASP, 0 BSP, N SSP")
    parser.add_argument("mutants", nargs="*", metavar="mutant", help="checks to leave out: " + ", ".join(MUTANTS))
    parser.add_argument("--joining", action="store_true", help="begin before anybody has joined")
    parser.add_argument("--states", action="store_true", help="workers have states that travel with each push")
    parser.add_argument("--drops", action="store_true", help="late contributions are dropped")
    parser.add_argument("--limit", type=int, default=5_000_000, help="states to visit at most")
    counts = {"rounds": 2, "workers": 2, "max_pending": 0, "units": 0, "quorum": 0, "units_per_round": 0, "fixed": 0}
    counts |= Faults()._asdict()
    for name, default in counts.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    got = parser.parse_args(arguments)
    if unknown := set(got.mutants) - set(MUTANTS):
        parser.error(f"no such mutant: {', '.join(sorted(unknown))}")
    faults = Faults(*(getattr(got, name) for name in Faults._fields))
    sizes = (got.rounds, got.workers, got.max_pending, not got.joining, got.units, got.quorum, got.drops)
    sizes = (*sizes, got.units_per_round, got.states, got.fixed)
    began = time.perf_counter()
    result = explore(Model(got.shards, got.staleness, faults, frozenset(got.mutants), *sizes), got.limit)
    whole = "" if result.complete else ", not all there are"
    print(f"{result.states} states{whole}, {time.perf_counter() - began:.1f} s, {len(result.found)} violations")
    for what, lines in result.found.items():
        print(f"\n{what}:", *(f"{n:3}. {line}" for n, line in enumerate(lines, 1)), sep="\n")
    return len(result.found)


if __name__ == "__main__":
    raise SystemExit(main())
