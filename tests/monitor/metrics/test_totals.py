"""What is counted of a job's entries, without a server."""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from kvps_monitor.metrics.totals import SECONDS, STALENESS, Histogram, JobTotals, WorkerTotals
from kvps_monitor.spans import ShardVersion

from kvps.history.events import Event
from kvps.protocol.job_state import Member


@given(st.lists(st.integers(0, 200)), st.sampled_from([STALENESS, SECONDS]))
def test_a_histogram_counts_each_value_in_the_lowest_bucket_that_has_it(values: list[int], bounds: Any) -> None:
    histogram = Histogram(bounds)
    for value in values:
        histogram.add(value)
    found = histogram.cumulative()
    assert found == [(b, sum(value <= b for value in values)) for b in (*bounds, math.inf)]
    assert histogram.sum == sum(values)
    assert [bisect_left(bounds, b) for b in bounds] == list(range(len(bounds)))


def commit(version: int, *staleness: int) -> Event:
    return Event(
        0, "commit", {"version": version, "contributions": [{"worker": "w0", "staleness": s} for s in staleness]}
    )


def test_gaps_in_versions_are_missed_ones() -> None:
    totals = JobTotals(1, begin=10)
    totals.add_events([commit(11), commit(12, 0, 3), commit(15, 1)])
    assert (totals.missed, totals.workers["w0"].staleness.sum) == (2, 4)
    totals.add_events([Event(0, "recover", {"version": 13, "lost": 2}), commit(14, 5), commit(15)])
    assert (totals.missed, totals.recoveries) == (2, 1)


def member(clock: int, incarnation: str, dropped: int) -> Member:
    entry = {"rank": 0, "incarnation": incarnation, "state": "active", "accepted": 1, "round": clock}
    entry |= {"finished": False, "host": "h", "pid": 1, "device": "cpu", "dropped": dropped}
    return Member.of("w0", json.dumps(entry), clock, clock)


def test_late_ones_of_each_incarnation_add_up_and_a_clock_never_goes_back() -> None:
    totals, seen = WorkerTotals(), []
    for clock, incarnation, dropped in ((1, "1-a", 0), (2, "1-a", 2), (2, "1-a", 2), (5, "2-b", 1), (4, "2-b", 3)):
        totals.look_at(member(clock, incarnation, dropped))
        seen.append((totals.contributions, totals.late))
    assert seen == [(1, 0), (2, 2), (2, 2), (5, 3), (5, 5)]


def shard_version(shard: int, version: int, squares: float) -> ShardVersion:
    return ShardVersion(shard, "1-0", version, 1, 0, {"commit": 2.0}, 3, 4, squares)


def test_the_norm_is_that_of_the_newest_version_of_all_shards() -> None:
    totals = JobTotals(2, begin=0)
    totals.add_versions(0, [shard_version(0, 1, 9.0), shard_version(0, 2, 1.0), shard_version(0, 3, 7.0)])
    assert totals.gradient_norm is None
    totals.add_versions(1, [shard_version(1, 1, 16.0)])
    assert totals.gradient_norm == 5.0
    totals.add_versions(1, [shard_version(1, 2, 3.0)])
    assert totals.gradient_norm == 2.0
    assert totals.shards[0].phases["commit"].sum == 0.006
    assert (totals.shards[0].received, totals.shards[0].stored) == (9, 12)
