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
from collections.abc import Generator, Mapping
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
    seconds of each part that a flow has for itself. `kind` groups activities in `Fluid.busy`."""

    kind: str
    shared: Mapping[str, float]
    own: Mapping[str, float] = field(default_factory=dict)

    @cached_property
    def limit(self) -> float:
        """The most units a second of one flow."""
        longest = max(self.own.values(), default=0.0)
        return 1 / longest if longest > 0 else math.inf

    @cached_property
    def weight(self) -> float:
        """The units a second at which a flow takes the whole of the shared resource that it needs most."""
        longest = max(self.shared.values(), default=0.0)
        return 1 / longest if longest > 0 else math.inf

    @cached_property
    def alone_s(self) -> float:
        """Seconds of one unit if nothing else runs."""
        return max(*self.own.values(), *self.shared.values(), 0.0, 0.0)


class _Flows:
    """All flows of one activity: how many run, the units that each running flow has had, and when each is done."""

    def __init__(self) -> None:
        self.number = 0
        self.served = 0.0
        self.rate = 0.0
        self.ends: list[tuple[float, int, int, simpy.Event]] = []


class Fluid:
    """The flows of a simulation. Rates change when a flow begins or ends.

    With a `step_s`, rates change only at whole multiples of it, and flows end there: so the number of changes is
    bounded by time and not by the number of flows. busy  (kind, resource or part) -> seconds that it was busy so far;
    those of parts are summed over all flows.
    """

    def __init__(self, env: simpy.Environment, step_s: float = 0.0) -> None:
        self.busy: dict[tuple[str, str], float] = {}
        self.changes = 0
        self._env = env
        self._step_s = step_s
        self._flows: dict[Activity, _Flows] = {}
        self._begun: dict[tuple[Activity, float], tuple[int, simpy.Event]] = {}
        self._down: set[str] = set()
        self._at = env.now
        self._ticks = itertools.count()
        self._due = math.inf
        self._number = itertools.count()

    def run(self, activity: Activity, units: float = 1.0, flows: int = 1) -> simpy.Event:
        """Begin `flows` flows that are alike, each with so many units. Return the event that all of them are done."""
        if units <= 0 or flows <= 0 or activity.alone_s <= 0:
            return self._env.event().succeed()
        number, done = self._begun.get((activity, units), (0, None))
        if done is None:
            done = self._env.event()
            self._plan_change(self._env.now)
        self._begun[activity, units] = number + flows, done  # those that begin together end together
        return done

    def stop(self, resource: str) -> None:
        """Let all flows that need a resource stand still until `go_on`."""
        self._advance()
        self._down.add(resource)
        self._plan_change(self._env.now)

    def go_on(self, resource: str) -> None:
        """End what `stop` began."""
        self._advance()
        self._down.discard(resource)
        self._plan_change(self._env.now)

    # -- time --------------------------------------------------------------------------------------------------

    def _plan_change(self, at_s: float) -> None:
        """Set the rates anew at this time, or at the next multiple of the step."""
        if self._step_s:
            at_s = math.ceil(at_s / self._step_s - _CLOSE) * self._step_s
        if at_s < self._due:
            self._due = at_s
            self._env.process(self._change(at_s, next(self._ticks)))

    def _change(self, at_s: float, tick: int) -> Wait:
        yield self._env.timeout(max(0.0, at_s - self._env.now))
        if at_s != self._due:  # an earlier change has come in between
            return
        self._due = math.inf
        self._advance()
        self._end()
        self._begin()
        self._share()
        left = [(f.ends[0][0] - f.served) / f.rate for f in self._flows.values() if f.rate > 0]
        if left:
            self._plan_change(self._env.now + max(0.0, min(left)))

    def _advance(self) -> None:
        """Serve all flows up to now."""
        passed, self._at = self._env.now - self._at, self._env.now
        if passed <= 0:
            return
        for activity, flows in self._flows.items():
            flows.served += flows.rate * passed
            for name, seconds in itertools.chain(activity.shared.items(), activity.own.items()):
                key = activity.kind, name
                self.busy[key] = self.busy.get(key, 0.0) + flows.number * flows.rate * seconds * passed

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

    # -- shares ------------------------------------------------------------------------------------------------

    def _share(self) -> None:
        """Raise the rates of all activities together until a resource is full or a limit is reached; then the rest."""
        self.changes += 1
        free: dict[str, float] = {}
        growing: dict[Activity, _Flows] = {}
        for activity, flows in self._flows.items():
            flows.rate = 0.0
            if not self._down.isdisjoint(activity.shared):
                continue
            growing[activity] = flows
            for name in activity.shared:
                free[name] = 1.0
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
            held = [
                a for a, f in growing.items() if f.rate >= a.limit * (1 - _CLOSE) or not full.isdisjoint(_needed(a))
            ]
            for activity in held or list(growing):  # all of them, if rounding hides who is held back
                del growing[activity]


def _needed(activity: Activity) -> list[str]:
    return [name for name, seconds in activity.shared.items() if seconds > 0]
