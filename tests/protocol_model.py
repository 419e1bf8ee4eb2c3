"""The commit protocol as a small model, explored breadth first over all interleavings.

    python tests/protocol_model.py SHARDS STALENESS [MUTANT ...] [--kills N ...]

`protocol_scripts` has the Lua scripts; around them `Model` has what the clients do: workers that join, pull, push and
leave; aggregators that look, stage, say ready or reject. Workers may be killed, wrongly evicted, and replaced while
they still run; leases may expire under their holders; a reply may be lost, and a write of a cut connection may land
late; a contribution may turn out bad.
`Model.broken` says what must never be, in any state that can be reached. Each mutant leaves one check out, so that
it is known which of them the exploration can tell from none.

Not here: time (who is silent and whose lease ran out is chance), a Redis that loses writes (so neither history, head
nor base can be wrong), gradients' bytes (bad is what an aggregator finds bad), ranks, and readers. A new holder
sweeps what others staged under their terms, as the design lets it. A killed aggregator is one that never moves again.
"""

from __future__ import annotations

import argparse
import time
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from protocol_scripts import (
    ACTIVE,
    AGGREGATORS,
    GONE,
    MUTANTS,
    NO_FAULTS,
    Faults,
    Holder,
    Plan,
    Scripts,
    Session,
    Staged,
    State,
    Step,
    entry_of,
    put,
)

from kvps.clocks import ASP, admits
from kvps.config import JobConfig


@dataclass(frozen=True)
class Model:
    """A job at small bounds. `max_pending` 0 is what a job would choose; `joined` begins with all workers there."""

    shards: int = 1
    staleness: int = 0
    faults: Faults = NO_FAULTS
    without: frozenset[str] = frozenset()
    rounds: int = 2
    workers: int = 2
    max_pending: int = 0
    joined: bool = True
    scripts: Scripts = field(init=False)

    def __post_init__(self) -> None:
        limit = JobConfig(staleness=self.staleness, max_pending=self.max_pending).max_pending
        object.__setattr__(self, "scripts", Scripts(self.staleness, limit, self.without))

    def start(self) -> State:
        """The aggregators hold the shards in turn, each under its first term."""
        holders = [[Holder(1, ()) if shard % 2 == a else None for shard in range(self.shards)] for a in AGGREGATORS]
        s = State(
            *((), (0,) * self.workers, (None,) * self.workers, (), None, 0, (None,) * self.shards),
            *(tuple(shard % 2 for shard in range(self.shards)), (1,) * self.shards, (0,) * self.shards),
            frozenset(Staged(shard, 0, 0, ()) for shard in range(self.shards)),
            *((None,) * self.workers, None, tuple(map(tuple, holders)), None, self.faults),
            *(frozenset(), frozenset(), ""),
        )
        for worker in range(self.workers if self.joined else 0):
            s = next(step.state for step in self._membership(s, worker))
        return s

    def over(self, s: State) -> bool:
        """Whether all is committed or rejected, and every worker has finished or is gone for good."""
        return not s.inbox and not s.plan and not any(s.sessions) and all(e and e.state == GONE for e in s.entries)

    def steps(self, s: State) -> Iterator[Step]:
        """All that may happen next."""
        _, t = self.scripts.plan(s)
        if t != s:
            yield Step(f"{t.plan} of version {s.version + 1} is opened", t)
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

    # -- workers ----------------------------------------------------------------------------------------------

    def _membership(self, s: State, worker: int) -> Iterator[Step]:
        """A worker comes, is replaced, is killed, is thought gone."""
        entry, session = s.entries[worker], s.sessions[worker]
        active = entry is not None and entry.state == ACTIVE
        if not (active or s.zombie) if session else not (entry and entry.finished):
            (_, life, round_), t = self.scripts.join(s, worker)
            t = t._replace(sessions=put(s.sessions, worker, Session(life, 0, round_)))
            if session and (session.does != "pull" or session.round >= self.rounds):  # else it sees that it is out
                t = t._replace(zombie=(worker, session))
            yield Step(f"w{worker} joins as .{life} at round {round_}", t, sure=entry is None)
        if session and (t := s.spending("kills")):
            yield Step(f"w{worker} is killed", t._replace(sessions=put(s.sessions, worker, None)), sure=False)
        if active and not session:
            yield Step(f"w{worker} is evicted", self.scripts.evict(s, worker)[1])
        elif active and (t := s.spending("evictions")):
            yield Step(f"w{worker} is evicted though it lives", self.scripts.evict(t, worker)[1], sure=False)

    def _session(self, s: State, worker: int, session: Session, zombie: bool) -> Iterator[Step]:
        """A worker's process leaves, pulls, pushes or asks."""
        who, entry = f"w{worker}.{session.incarnation}", entry_of(s, worker)

        def then(t: State, after: Session | None) -> State:
            if zombie:
                return t._replace(zombie=(worker, after) if after else None)
            return t._replace(sessions=put(t.sessions, worker, after))

        if session.does == "pull" and session.round >= self.rounds:
            yield Step(f"{who} leaves", then(self.scripts.leave(s, worker, session.incarnation)[1], None))
        elif session.does == "pull" and (entry.incarnation != session.incarnation or entry.state != ACTIVE):
            yield Step(f"{who} sees that it is out", then(s, None))
        elif session.does == "pull":
            committed = [s.clock[w] + e.skip for w, e in enumerate(s.entries) if e and e.state != GONE]
            if admits(session.round, committed, self.staleness) or "session-bound" in self.without:
                t = then(s, session._replace(does="push"))._replace(wrong=self._judged(s, session.round))
                yield Step(f"{who} pulls version {s.version} for round {session.round + 1}", t)
        else:
            answer, t = self.scripts.push(s, worker, session.incarnation, session.seq + 1)
            match answer:
                case ("ACK", round_):
                    after = session._replace(seq=session.seq + 1, round=round_, does="pull")
                    yield Step(f"{who} pushes round {round_}", then(t, after))
                case ("EVICTED",):
                    yield Step(f"{who} may not push", then(t, None))
                case ("SEQUENCE",):
                    yield Step(f"{who} pushes", s._replace(wrong="a worker in order is told SEQUENCE"))
            if t != s and (t := t.spending("lost")):
                yield Step(f"{who} pushes, the reply is lost", then(t, session._replace(does="ask")), sure=False)
            if session.does == "ask":  # it may also push again blindly, as above
                answer, _ = self.scripts.push(s, worker, session.incarnation, session.seq + 1, ask=True)
                if answer == ("NEW",):
                    yield Step(f"{who} asks: {answer[0]}", then(s, session._replace(does="push")))

    def _judged(self, s: State, done: int) -> str:
        """What is wrong if a worker with so many rounds done computes the next on these weights."""
        if self.staleness == 0 and s.version != done:
            return "BSP: a round is computed on another version than that of the last round"
        for worker, entry in enumerate(s.entries):
            if self.staleness == ASP or not entry or entry.state == GONE:
                continue
            missing = [c.round for c in s.inbox if c.worker == worker]
            if entry.state == ACTIVE:
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
            found = [b.weights for b in s.bytes if b[:3] == (shard, s.version, s.names[shard])]
            if term and found:  # if they are not there, `broken` says so
                yield Step(f"{who} takes term {term}", self._held(t, a, shard, Holder(term, found[0])), sure)
        elif holder.does == "look":
            if s.plan is None or holder.staged == s.plan:
                return  # it may settle later: without a plan to do it comes to the same
            settled = self._settled(s, holder)
            if settled is None:
                yield Step(f"{who} has old weights", self._held(s, a, shard, None))
            elif settled.staged and "holder-restages" not in self.without:
                after = settled._replace(does="retake", plan=s.plan)
                yield Step(f"{who} sees {s.plan}, needs a new term", self._held(s, a, shard, after))
            else:
                yield from self._stage(s, a, shard, settled, s.plan)
        elif holder.does == "retake" and holder.plan:
            term, t, sure = self._take(s, a, shard)
            if not term or not sure:
                yield Step(f"{who} has lost the lease", self._held(s, a, shard, None))
            if term and "holder-retakes" not in self.without and t.version != len(holder.weights):
                yield Step(f"{who} takes term {term}, has old weights", self._held(t, a, shard, None), sure)
            elif term:
                staged = holder.staged if "holder-retakes" in self.without else None
                for step in self._stage(t, a, shard, holder._replace(term=term, staged=staged), holder.plan):
                    yield step._replace(label=f"{who} takes term {term}; {step.label}", sure=step.sure and sure)
        elif holder.does == "say" and holder.staged:
            yield from self._say(s, a, shard, holder, holder.staged)
        elif holder.does == "reject" and holder.plan and holder.bad:
            (answer, *_), t = self.scripts.reject(s, shard, holder.term, holder.plan, holder.bad)
            label = f"{who} rejects w{holder.bad.worker}:{holder.bad.round} of {holder.plan}: {answer}"
            yield Step(label, self._held(t, a, shard, holder._replace(does="look", plan=None, bad=None)))
            if t != s and (t := t.spending("lost")):
                yield Step(f"{label}, the reply is lost", t, sure=False)

    def _take(self, s: State, a: int, shard: int) -> tuple[int, State, bool]:
        """A new term, or 0; and whether no lease had to expire for it."""
        answer, t = self.scripts.acquire(s, shard, a, expired=False)
        if answer[0] == "HELD" and (spent := s.spending("takeovers")):
            answer, t = self.scripts.acquire(spent, shard, a, expired=True)
        return (answer[1] if answer[0] == "OK" else 0), t, s.leases[shard] == a

    def _settled(self, s: State, holder: Holder) -> Holder | None:
        """What it staged it takes for committed once the version is; with older weights it drops the shard."""
        if holder.staged and holder.staged.version <= s.version:
            holder = holder._replace(weights=(*holder.weights, holder.staged.id), staged=None)
        stale = len(holder.weights) < s.version and "holder-stale" not in self.without
        return None if stale else holder

    def _stage(self, s: State, a: int, shard: int, holder: Holder, plan: Plan) -> Iterator[Step]:
        """Compute and store the plan's version, or find that it cannot be computed."""
        staged = Staged(shard, plan.version, holder.term, (*holder.weights, plan.id))
        t = self._held(s.stored(staged), a, shard, holder._replace(staged=plan, does="say", plan=None))
        label = f"a{a}/s{shard} stages {plan} as {staged.version}.{staged.term}"
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
        (answer, *_), t = self.scripts.ready(s, shard, holder.term, plan, (*holder.weights, plan.id))
        label = f"a{a}/s{shard} says ready for {plan}: {answer}"
        after: Holder | None = holder._replace(does="look")
        if answer == "FLIPPED":
            after = self._settled(t, holder._replace(does="look"))
        if answer == "TERM":
            after = None
        if answer == "DIGEST":
            t = t._replace(wrong="a holder in order is told DIGEST")
        yield Step(label, self._held(t, a, shard, after))
        if t != s and (t := t.spending("lost")):
            yield Step(f"{label}, the reply is lost", t, sure=False)

    def _held(self, s: State, a: int, shard: int, holder: Holder | None) -> State:
        return s._replace(holders=put(s.holders, a, put(s.holders[a], shard, holder)))

    # -- the judge --------------------------------------------------------------------------------------------

    def broken(self, s: State) -> str:
        """What is wrong with a state, or ""."""
        if s.wrong:
            return s.wrong
        committed = [c for plan in s.log for c in plan.contributions]
        places = [*committed, *s.inbox, *s.rejected]
        if not s.accepted.issubset(places):
            return "an acknowledged contribution is lost"
        if len({c[:3] for c in places}) < len(places):
            return "a contribution is there twice"
        if len({(c.worker, c.round) for c in places}) < len(places):
            return "a worker has two contributions for one round"
        done, waiting = Counter(c.worker for c in committed), Counter(c.worker for c in s.inbox)
        waiting.update(s.plan.over if s.plan else ())
        for worker, entry in enumerate(s.entries):
            if s.clock[worker] != done[worker]:
                return "a clock is not the count of commits"
            if (entry.pending if entry else 0) != waiting[worker]:
                return "pending is not the count of what waits"
            if entry and entry.pending > self.scripts.max_pending:
                return "more than max_pending wait"
            if entry and entry.state == GONE and entry.pending:
                return "a worker is gone though its contributions wait"
        spent = self.faults.kills - s.faults.kills + self.faults.evictions - s.faults.evictions
        if sum(entry.incarnation - 1 for entry in s.entries if entry) > spent:
            return "a worker was put out though no fault did it"
        if s.log and None in s.entries:
            return "a version is committed before all workers have joined"
        decided = tuple(plan.id for plan in s.log)
        for shard, term in enumerate(s.names):
            visible = [b.weights for b in s.bytes if b[:3] == (shard, s.version, term)]
            if not visible:
                return "a shard's visible bytes were swept or never staged"
            if visible[0] != decided:
                return "a shard's visible bytes are not what was decided"
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
    parser.add_argument("--limit", type=int, default=5_000_000, help="states to visit at most")
    counts = {"rounds": 2, "workers": 2, "max_pending": 0} | Faults()._asdict()
    for name, default in counts.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    got = parser.parse_args(arguments)
    if unknown := set(got.mutants) - set(MUTANTS):
        parser.error(f"no such mutant: {', '.join(sorted(unknown))}")
    faults = Faults(*(getattr(got, name) for name in Faults._fields))
    sizes = (got.rounds, got.workers, got.max_pending, not got.joining)
    began = time.perf_counter()
    result = explore(Model(got.shards, got.staleness, faults, frozenset(got.mutants), *sizes), got.limit)
    whole = "" if result.complete else ", not all there are"
    print(f"{result.states} states{whole}, {time.perf_counter() - began:.1f} s, {len(result.found)} violations")
    for what, lines in result.found.items():
        print(f"\n{what}:", *(f"{n:3}. {line}" for n, line in enumerate(lines, 1)), sep="\n")
    return len(result.found)


if __name__ == "__main__":
    raise SystemExit(main())
