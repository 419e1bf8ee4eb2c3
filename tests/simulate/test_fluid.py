"""Flows that share resources, against times that can be computed by hand."""

from __future__ import annotations

import pytest
import simpy
from kvps_simulate.fluid import Activity, Fluid, Wait


def ends(*flows: tuple[Activity, float, float, int], step_s: float = 0.0) -> list[float]:
    """When each of (activity, units, begin, flows) ends."""
    env = simpy.Environment()
    net, found = Fluid(env, step_s), [0.0] * len(flows)

    def one(number: int, activity: Activity, units: float, begin: float, count: int) -> Wait:
        yield env.timeout(begin)
        yield net.run(activity, units, count)
        found[number] = env.now

    for number, flow in enumerate(flows):
        env.process(one(number, *flow))
    env.run()
    return found


LINK = Activity("send", {"link": 1.0})


def test_one_flow_takes_its_bytes_over_the_bandwidth() -> None:
    assert ends((LINK, 3.0, 0.0, 1)) == pytest.approx([3.0])


def test_flows_share_a_link_evenly_and_the_rest_goes_to_who_is_left() -> None:
    assert ends(*[(LINK, 1.0, 0.0, 1)] * 4) == pytest.approx([4.0] * 4)
    assert ends((LINK, 1.0, 0.0, 1), (LINK, 3.0, 0.0, 1)) == pytest.approx([2.0, 4.0])
    assert ends((LINK, 2.0, 0.0, 1), (LINK, 2.0, 1.0, 1)) == pytest.approx([3.0, 4.0])
    assert ends((LINK, 1.0, 0.0, 10), (LINK, 1.0, 0.0, 5)) == pytest.approx([15.0, 15.0]), "ten that begin at once"


def test_what_a_slow_flow_leaves_the_others_get() -> None:
    slow = Activity("send", {"link": 1.0}, {"its own link": 4.0})
    assert ends((slow, 1.0, 0.0, 1), (LINK, 3.0, 0.0, 1)) == pytest.approx([4.0, 4.0])


def test_a_flow_gets_an_equal_share_of_what_it_needs_most() -> None:
    heavy = Activity("send", {"core": 2.0, "link": 0.5})
    light = Activity("send", {"core": 1.0})
    # Each has half of the core: the light one ends at 2 s, and the heavy one has the rest of its 2 s alone.
    assert ends((heavy, 1.0, 0.0, 1), (light, 1.0, 0.0, 1)) == pytest.approx([3.0, 2.0])


def test_a_resource_that_stops_holds_its_flows_and_no_others() -> None:
    env = simpy.Environment()
    net = Fluid(env)
    here, there = net.run(LINK, 2.0), net.run(Activity("other", {"core": 1.0}), 2.0)
    found = {}
    for name, event in {"here": here, "there": there}.items():
        event.callbacks.append(lambda _, name=name: found.setdefault(name, env.now))  # type: ignore[misc, union-attr]
    env.run(until=1.0)
    net.stop("link")
    env.run(until=6.0)
    net.go_on("link")
    env.run()
    assert found == pytest.approx({"there": 2.0, "here": 7.0})
    assert net.busy["send", "link"] == pytest.approx(2.0)


def test_a_step_bounds_the_changes_and_delays_the_end_by_no_more_than_two_steps() -> None:
    flows = [(LINK, 0.01, i / 1000, 1) for i in range(1000)]
    exact, stepped = ends(*flows), ends(*flows, step_s=0.1)
    assert max(exact) <= max(stepped) <= max(exact) + 0.2 + 1e-9
    env = simpy.Environment()
    net = Fluid(env, 0.1)
    for _ in range(1000):
        net.run(LINK, 0.01)
    env.run()
    assert net.changes <= 110


def test_nothing_to_do_ends_at_once() -> None:
    assert ends((LINK, 0.0, 1.0, 1), (Activity("none", {}), 1.0, 2.0, 1)) == [1.0, 2.0]
