"""The processes of a simulated job: workers, aggregators and what fails, as docs/protocol.md has them act."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import simpy

from kvps_simulate.demands import REDIS, Demands
from kvps_simulate.fluid import Activity, Fluid, Wait
from kvps_simulate.settings import Constants, Setting

_MOST_PLANNED = 512  # contributions in a plan of SSP or ASP
_STEPS = 1500  # rates change so often in a round with many workers
_FEW = 64  # workers for which every change is exact


@dataclass
class Record:
    """What happened, in seconds and versions.

    rounds      seconds of each worker's round, from one pull to the next, round by round; nothing follows the last
    staleness   of each committed contribution: versions between the one it was computed on and the one it made
    computed_s  spent on contributions that were committed
    """

    commits: list[tuple[float, int]] = field(default_factory=list)
    rounds: list[list[float]] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)
    computed_s: float = 0.0
    lost: int = 0
    evictions: int = 0
    failovers: int = 0
    end_s: float = 0.0
    changes: int = 0


@dataclass
class _Contribution:
    worker: int
    base: int
    computed_s: float
    early: bool = False


class Job:
    """One simulated job. `run` simulates it once."""

    def __init__(self, setting: Setting, constants: Constants) -> None:
        self.demands = Demands(setting, constants)
        self.record = Record(rounds=[[] for _ in range(setting.rounds - 1)])
        self.env = simpy.Environment()
        step = shortest_round(self.demands) / _STEPS if setting.workers > _FEW else 0.0
        self.net = Fluid(self.env, step)
        self._s = setting
        self._random = np.random.default_rng(setting.seed)
        self._inbox: list[_Contribution] = []
        self._committed = [0] * setting.workers
        self._pushed = [0] * setting.workers
        self._counts = Counter({0: setting.workers})  # committed round -> members that are there
        self._version = 0
        self._turns = self.env.event()
        self._arrived = self.env.event()
        self._arrivals = 0

    @property
    def committed(self) -> int:
        """How many contributions are committed."""
        return sum(self._committed)

    def run(self) -> Record:
        """Simulate all rounds."""
        done = self.env.all_of([self.env.process(self._worker(number)) for number in range(self._s.workers)])
        self.env.process(self._aggregators())
        if self._s.node_failures:
            self.env.process(self._node_failures())
        self.env.run(until=done)
        self.record.end_s = self.env.now
        self.record.changes = self.net.changes
        return self.record

    # -- workers -----------------------------------------------------------------------------------------------

    def _worker(self, me: int) -> Wait:
        d, s, pulled_at = self.demands, self._s, None
        while self._pushed[me] < s.rounds:
            if not self._admits(me):
                yield from self._await_turn(me)
            yield from self._call(d.turn)
            base = self._version
            yield self.net.run(d.pull)
            if pulled_at is not None:
                self.record.rounds[self._pushed[me] - 1].append(self.env.now - pulled_at)
            pulled_at = self.env.now
            computes_s = self._compute_s()
            if self._dies_within(computes_s):
                yield self.env.timeout(computes_s * self._random.random())
                yield from self._die(me)
                pulled_at = None
                continue
            if computes_s:
                yield self.env.timeout(computes_s)
            yield self.net.run(d.push)
            yield from self._call(d.accept)
            while self._pushed[me] - self._committed[me] >= s.max_pending:
                yield self._turns
            self._pushed[me] += 1
            self._inbox.append(_Contribution(me, base, computes_s))
            self._wake_aggregators()
        while self._committed[me] < self._pushed[me]:
            yield self._turns

    def _admits(self, me: int) -> bool:
        bound = self._s.staleness
        return bound < 0 or self._lowest() >= self._pushed[me] - bound

    def _lowest(self) -> int:
        return min(self._counts, default=self._s.rounds)

    def _await_turn(self, me: int) -> Wait:
        while not self._admits(me):
            yield self._turns

    def _call(self, activity: Activity) -> Wait:
        """A request and its reply."""
        if self._s.latency_s and not self.demands.local:
            yield self.env.timeout(2 * self._s.latency_s)
        yield self.net.run(activity)

    def _compute_s(self) -> float:
        s = self._s
        factor = math.exp(self._random.normal(0.0, s.jitter)) if s.jitter else 1.0
        if s.slow and self._random.random() < s.slow:
            factor *= s.slow_by
        return s.compute_s * factor

    # -- failures ----------------------------------------------------------------------------------------------

    def _dies_within(self, seconds: float) -> bool:
        rate = self._s.worker_failures / 3600
        return bool(rate) and self._random.random() < -math.expm1(-rate * max(seconds, 1e-3))

    def _die(self, me: int) -> Wait:
        """A worker dies, is evicted if it is away for long enough, and joins where the others are."""
        s, self.record.lost = self._s, self.record.lost + 1
        if s.restart_s <= s.detect_s:
            yield self.env.timeout(s.restart_s)
            return
        yield self.env.timeout(s.detect_s)
        while self._pushed[me] > self._committed[me]:  # what was accepted still commits
            yield self._turns
        self._count(self._committed[me], -1)
        self.record.evictions += 1
        self._wake_workers()
        self._wake_aggregators()
        yield self.env.timeout(max(0.0, s.restart_s - s.detect_s))
        if s.staleness >= 0:
            furthest = max(self._counts, default=0)
            admitted = furthest - s.staleness - 1 if s.staleness else furthest
            self._pushed[me] = self._committed[me] = max(self._pushed[me], admitted)
        self._count(self._committed[me], 1)
        yield from self._call(self.demands.turn)

    def _node_failures(self) -> Wait:
        mean_s = 3600 / (self._s.node_failures * self._s.nodes)
        while True:
            yield self.env.timeout(self._random.exponential(mean_s))
            self.record.failovers += 1
            self.net.stop(REDIS)
            yield self.env.timeout(self._s.failover_s)
            self.net.go_on(REDIS)

    # -- aggregators -------------------------------------------------------------------------------------------

    def _aggregators(self) -> Wait:
        """All aggregators: they are alike, so they act at once."""
        n, looked_at, seen = self._s.aggregators, self.env.now, 0
        while True:
            if self._arrivals == seen:
                yield self._arrived
            arrived, seen = self._arrivals - seen, self._arrivals
            yield from self._look(arrived, looked_at)
            looked_at = self.env.now
            if chosen := self._due():
                yield from self._make(chosen)
                seen = -1  # it looks again at once
                continue
            waiting = next((c for c in self._inbox if not c.early), None)
            if waiting and sum(c.early for c in self._inbox) < self.demands.early:
                waiting.early = True
                yield self.net.run(self.demands.fetch, flows=n)
                seen = -1

    def _look(self, arrived: int, looked_at: float) -> Wait:
        """Each aggregator was woken by each push since it last looked, unless it was still busy with the last."""
        look = self.demands.look(len(self._inbox))
        cycle = self._s.aggregators * max(look.shared.values(), default=0.0) + sum(look.own.values())
        cycle += 2 * self._s.latency_s
        times = max(1.0, min(arrived, (self.env.now - looked_at) / cycle)) if cycle else 1.0
        yield self.net.run(look, times, flows=self._s.aggregators)

    def _due(self) -> list[_Contribution]:
        if self._s.staleness == 0:
            lowest = self._lowest()
            if not 0 < self._counts[lowest] <= len(self._inbox):
                return []
            chosen = [c for c in self._inbox if self._committed[c.worker] == lowest]
            return chosen if len(chosen) >= self._counts[lowest] else []
        return self._inbox[:_MOST_PLANNED]

    def _make(self, chosen: list[_Contribution]) -> Wait:
        """The next version: plan, reduce and stage, ready for each shard, commit."""
        d, n, number = self.demands, self._s.aggregators, len(chosen)
        yield from self._call(d.plan(number))
        yield self.net.run(d.aggregate(number, sum(c.early for c in chosen)), flows=n)
        if self._s.latency_s and not d.local:
            yield self.env.timeout(2 * self._s.latency_s * math.ceil(self._s.shards / n))
        yield self.net.run(d.ready, self._s.shards / n, flows=n)
        yield self.net.run(d.commit(number))
        self._commit(chosen)
        yield self.net.run(d.free(number))

    def _commit(self, chosen: list[_Contribution]) -> None:
        taken = set(map(id, chosen))
        self._inbox = [c for c in self._inbox if id(c) not in taken]
        self._version += 1
        self.record.commits.append((self.env.now, len(chosen)))
        for c in chosen:
            self.record.staleness.append(self._version - 1 - c.base)
            self.record.computed_s += c.computed_s
            self._count(self._committed[c.worker], -1)
            self._committed[c.worker] += 1
            self._count(self._committed[c.worker], 1)
        self._wake_workers()

    def _count(self, round_: int, by: int) -> None:
        self._counts[round_] += by
        if not self._counts[round_]:
            del self._counts[round_]

    def _wake_workers(self) -> None:
        self._turns.succeed()
        self._turns = self.env.event()

    def _wake_aggregators(self) -> None:
        self._arrivals += 1
        self._arrived.succeed()
        self._arrived = self.env.event()


def shortest_round(demands: Demands) -> float:
    """Return the least seconds that a round can take: no two of its parts overlap worse than perfectly."""
    s = demands.setting
    steps = [
        (demands.push, s.workers),
        (demands.pull, s.workers),
        (demands.accept, s.workers),
        (demands.turn, s.workers),
    ]
    steps += [(demands.aggregate(s.workers, 0), s.aggregators), (demands.ready, s.shards)]
    resources = {name for activity, _ in steps for name in activity.shared}
    full = max(sum(a.shared.get(name, 0.0) * n for a, n in steps) for name in resources)
    return max(full, s.compute_s + sum(1 / a.limit for a, _ in steps))
