"""The processes of a simulated job, workers and aggregators, as docs/protocol.md has them act."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import simpy

from kvps.staleness import ASP
from kvps_simulate.demands import Demands
from kvps_simulate.fluid import Activity, Fluid, Wait
from kvps_simulate.settings import Constants, Setting

_MOST_PLANNED = 512  # contributions in a plan of SSP or ASP


@dataclass(eq=False)
class _Contribution:
    worker: int
    early: bool = False


class Job:
    """One simulated job. `run` simulates it once.

    rounds   seconds of each worker's round, from one pull to the next, round by round; nothing follows the last
    commits  when each version was committed, and of how many contributions
    """

    def __init__(self, setting: Setting, constants: Constants) -> None:
        self.demands = Demands(setting, constants)
        self.rounds: list[list[float]] = [[] for _ in range(setting.rounds - 1)]
        self.commits: list[tuple[float, int]] = []
        self.env = simpy.Environment()
        self.net = Fluid(self.env)
        self.setting = setting
        self._inbox: list[_Contribution] = []
        self._committed = [0] * setting.workers
        self._pushed = [0] * setting.workers
        self._counts = Counter({0: setting.workers})  # committed round -> workers that are there
        self._turns = self.env.event()
        self._arrived = self.env.event()
        self._arrivals = 0

    def run(self) -> Job:
        """Simulate all rounds."""
        done = self.env.all_of([self.env.process(self._worker(number)) for number in range(self.setting.workers)])
        self.env.process(self._aggregators())
        self.env.run(until=done)
        return self

    def _worker(self, me: int) -> Wait:
        d, s, pulled_at = self.demands, self.setting, None
        most_pending = 2 if s.staleness == ASP else s.staleness + 1  # as the job's setting is by default
        while self._pushed[me] < s.rounds:
            while not (s.staleness == ASP or min(self._counts) >= self._pushed[me] - s.staleness):
                yield self._turns
            yield from self._call(d.turn)
            yield self.net.run(d.pull)
            if pulled_at is not None:
                self.rounds[self._pushed[me] - 1].append(self.env.now - pulled_at)
            pulled_at = self.env.now
            if s.compute_s:
                yield self.env.timeout(s.compute_s)
            yield self.net.run(d.push)
            yield from self._call(d.accept)
            while self._pushed[me] - self._committed[me] >= most_pending:
                yield self._turns
            self._pushed[me] += 1
            self._inbox.append(_Contribution(me))
            self._arrivals += 1
            self._arrived.succeed()
            self._arrived = self.env.event()
        while self._committed[me] < self._pushed[me]:
            yield self._turns

    def _call(self, activity: Activity) -> Wait:
        """A request and its reply."""
        if self.setting.latency_s and not self.demands.local:
            yield self.env.timeout(2 * self.setting.latency_s)
        yield self.net.run(activity)

    def _aggregators(self) -> Wait:
        """All aggregators: they are alike, so they act at once."""
        n, looked_at, seen = self.setting.nodes, self.env.now, 0
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
        cycle = self.setting.nodes * max(look.shared.values(), default=0.0) + sum(look.own.values())
        cycle += 2 * self.setting.latency_s
        times = max(1.0, min(arrived, (self.env.now - looked_at) / cycle)) if cycle else 1.0
        yield self.net.run(look, times, flows=self.setting.nodes)

    def _due(self) -> list[_Contribution]:
        if self.setting.staleness:
            return self._inbox[:_MOST_PLANNED]
        lowest = min(self._counts)
        chosen = [c for c in self._inbox if self._committed[c.worker] == lowest]
        return chosen if len(chosen) == self._counts[lowest] else []

    def _make(self, chosen: list[_Contribution]) -> Wait:
        """The next version: plan, reduce and stage, ready for each shard, commit."""
        d, n, number = self.demands, self.setting.nodes, len(chosen)
        yield from self._call(d.plan(number))
        yield self.net.run(d.aggregate(number, sum(c.early for c in chosen)), flows=n)
        if self.setting.latency_s and not d.local:
            yield self.env.timeout(2 * self.setting.latency_s * math.ceil(self.setting.shards / n))
        yield self.net.run(d.ready, self.setting.shards / n, flows=n)
        yield self.net.run(d.commit(number))
        self._commit(chosen)
        yield self.net.run(d.free(number))

    def _commit(self, chosen: list[_Contribution]) -> None:
        self._inbox = [c for c in self._inbox if c not in chosen] if self.setting.staleness else []
        self.commits.append((self.env.now, len(chosen)))
        for c in chosen:
            round_ = self._committed[c.worker]
            self._counts[round_] -= 1
            if not self._counts[round_]:
                del self._counts[round_]
            self._committed[c.worker] = round_ + 1
            self._counts[round_ + 1] += 1
        self._turns.succeed()
        self._turns = self.env.event()
