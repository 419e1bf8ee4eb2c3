"""Flows that share resources, against times that can be computed by hand."""

from __future__ import annotations

import pytest
import simpy
from kvps_simulate.fluid import Activity, Fluid, Wait


def ends(*flows: tuple[Activity, float, float, int]) -> list[float]:
    """When each of (activity, units, begin, flows) ends."""
    env = simpy.Environment()
    net, found = Fluid(env), [0.0] * len(flows)

    def one(number: int, activity: Activity, units: float, begin: float, count: int) -> Wait:
        yield env.timeout(begin)
        yield net.run(activity, units, count)
        found[number] = env.now

    for number, flow in enumerate(flows):
        env.process(one(number, *flow))
    env.run()
    return found


LINK = Activity({"link": 1.0})


def test_one_flow_takes_its_bytes_over_the_bandwidth() -> None:
    assert ends((LINK, 3.0, 0.0, 1)) == pytest.approx([3.0])


def test_flows_share_a_link_evenly_and_the_rest_goes_to_who_is_left() -> None:
    assert ends(*[(LINK, 1.0, 0.0, 1)] * 4) == pytest.approx([4.0] * 4)
    assert ends((LINK, 1.0, 0.0, 1), (LINK, 3.0, 0.0, 1)) == pytest.approx([2.0, 4.0])
    assert ends((LINK, 2.0, 0.0, 1), (LINK, 2.0, 1.0, 1)) == pytest.approx([3.0, 4.0])
    assert ends((LINK, 1.0, 0.0, 10), (LINK, 1.0, 0.0, 5)) == pytest.approx([15.0, 15.0]), "ten that begin at once"


def test_a_flow_gets_an_equal_share_of_what_it_needs_most() -> None:
    heavy = Activity({"core": 2.0, "link": 0.5})
    light = Activity({"core": 1.0})
    # Each has half of the core: the light one ends at 2 s, and the heavy one has the rest of its 2 s alone.
    assert ends((heavy, 1.0, 0.0, 1), (light, 1.0, 0.0, 1)) == pytest.approx([3.0, 2.0])


def test_what_is_busy_is_counted() -> None:
    env = simpy.Environment()
    net = Fluid(env)
    net.run(Activity({"link": 1.0}, {"core": 0.5}), 2.0, 3)
    env.run()
    assert net.busy == pytest.approx({"link": 6.0, "core": 3.0})
