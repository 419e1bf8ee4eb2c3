"""Flows that share resources: bytes and processor time as fluids, on SimPy's clock.

A flow has so many units to do. A unit takes some seconds of resources that all flows share, and some seconds of parts
that the flow has for itself, such as its worker's own link. All flows of one activity are alike, so they have the same
rate: the cost of a step does not grow with their number.

Each flow gets an equal share of the shared resource that it needs most. What a flow cannot use, because a part of its
own or another resource holds it back, the others get (progressive filling, as in max-min fairness).
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Generator
from dataclasses import dataclass, field
from functools import cached_property

import simpy

Wait = Generator[simpy.Event, object, None]
"""What a process of the simulation is: it yields the events that it waits for."""
_CLOSE = 1e-9  # of a unit, or of a capacity: what is left of it is a rounding error
_DIGITS = 1e-14


@dataclass(frozen=True, eq=False)
class Activity:
    """What flows of one kind do. A unit takes `shared[resource]` seconds of each shared resource, and `own[part]`
    seconds of each part that a flow has for itself.

    limit   the most units a second of one flow
    weight  the units a second at which a flow takes the whole of the shared resource that it needs most
    """

    shared: dict[str, float]
    own: dict[str, float] = field(default_factory=dict)

    @cached_property
    def limit(self) -> float:
        return 1 / longest if (longest := max(self.own.values(), default=0.0)) > 0 else math.inf

    @cached_property
    def weight(self) -> float:
        return 1 / longest if (longest := max(self.shared.values(), default=0.0)) > 0 else math.inf


@dataclass
class _Flows:
    """All flows of one activity: how many run, the units that each running flow has had, and when each is done."""

    number: int = 0
    served: float = 0.0
    rate: float = 0.0
    ends: list[tuple[float, int, int, simpy.Event]] = field(default_factory=list)


class Fluid:
    """The flows of a simulation. Rates change when a flow begins or ends. `busy` is resource or part -> seconds that
    it was busy so far; those of parts are summed over all flows."""

    def __init__(self, env: simpy.Environment) -> None:
        self.busy: dict[str, float] = defaultdict(float)
        self._env = env
        self._flows: dict[Activity, _Flows] = {}
        self._begun: dict[tuple[Activity, float], tuple[int, simpy.Event]] = {}
        self._at = env.now
        self._due = math.inf
        self._number = itertools.count()

    def run(self, activity: Activity, units: float = 1.0, flows: int = 1) -> simpy.Event:
        """Begin `flows` flows that are alike, each with so many units. Return the event that all of them are done."""
        if units <= 0 or math.inf == activity.limit == activity.weight:
            return self._env.event().succeed()
        number, done = self._begun.get((activity, units), (0, None))
        if done is None:
            done = self._env.event()
            self._plan_change(self._env.now)
        self._begun[activity, units] = number + flows, done  # those that begin together end together
        return done

    def _plan_change(self, at_s: float) -> None:
        """Set the rates anew at this time."""
        if at_s < self._due:
            self._due = at_s
            self._env.process(self._change(at_s))

    def _change(self, at_s: float) -> Wait:
        yield self._env.timeout(max(0.0, at_s - self._env.now))
        if at_s != self._due:  # an earlier change has come in between
            return
        self._due = math.inf
        self._advance()
        self._end()
        self._begin()
        self._share()
        if left := [(f.ends[0][0] - f.served) / f.rate for f in self._flows.values() if f.rate > 0]:
            self._plan_change(self._env.now + max(0.0, min(left)))

    def _advance(self) -> None:
        """Serve all flows up to now."""
        passed, self._at = self._env.now - self._at, self._env.now
        for activity, flows in self._flows.items():
            flows.served += flows.rate * passed
            for name, seconds in (activity.shared | activity.own).items():
                self.busy[name] += flows.number * flows.rate * seconds * passed

    def _end(self) -> None:
        for activity, flows in list(self._flows.items()):
            # The clock cannot tell times that are closer than its last digits.
            near = flows.served + _CLOSE * (1 + flows.served) + flows.rate * self._env.now * _DIGITS
            while flows.ends and flows.ends[0][0] <= near:
                _, _, number, done = heapq.heappop(flows.ends)
                flows.number -= number
                done.succeed()
            if not flows.ends:
                del self._flows[activity]

    def _begin(self) -> None:
        begun, self._begun = self._begun, {}
        for (activity, units), (number, done) in begun.items():
            flows = self._flows.setdefault(activity, _Flows())
            flows.number += number
            heapq.heappush(flows.ends, (flows.served + units, next(self._number), number, done))

    def _share(self) -> None:
        """Raise the rates of all activities together until a resource is full or a limit is reached; then the rest."""
        growing = dict(self._flows)
        free = {name: 1.0 for activity in growing for name in activity.shared}
        for flows in growing.values():
            flows.rate = 0.0
        for activity in [a for a in growing if a.weight == math.inf]:
            growing.pop(activity).rate = activity.limit
        while growing:
            needs = dict.fromkeys(free, 0.0)
            for activity, flows in growing.items():
                for name, seconds in activity.shared.items():
                    needs[name] += flows.number * activity.weight * seconds
            grow = min(free[name] / need for name, need in needs.items() if need > 0)
            grow = min(grow, *((a.limit - f.rate) / a.weight for a, f in growing.items()))
            for activity, flows in growing.items():
                flows.rate += grow * activity.weight
            for name, need in needs.items():
                free[name] -= grow * need
            full = {name for name, need in needs.items() if need > 0 and free[name] <= _CLOSE}
            held = [a for a, f in growing.items() if f.rate >= a.limit * (1 - _CLOSE) or full & a.shared.keys()]
            for activity in held or list(growing):  # all of them, if rounding hides who is held back
                del growing[activity]
