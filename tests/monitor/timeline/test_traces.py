"""Traces, read back: lanes, counts and flows are those of Redis and of the commit log."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from helpers.experience import experienced
from helpers.harness import aggregating, await_version, gradient, model
from helpers.timelines import Read, Slice, read_perfetto, recorded, timed_job, versions_of
from kvps_monitor.timeline.perfetto import perfetto_trace
from kvps_monitor.timeline.recording import Recording, record

from kvps.job import Job
from kvps.store import Store

EXACT_US = 0.002  # times are written in whole nanoseconds


@pytest.mark.parametrize(
    "settings",
    [
        {"staleness": 0},
        {"staleness": 1, "shards": 2},
        {"staleness": -1, "workers": 8, "rounds": 4, "shards": 2},
    ],
    ids=["BSP", "SSP on two shards", "ASP of eight workers on two shards"],
)
def test_a_trace_has_what_redis_has(store: Store, settings: dict[str, Any]) -> None:
    job = timed_job(store, **settings)
    read = read_perfetto(perfetto_trace(record(job)))
    workers, shards = list(recorded(job)), [f"shard {n}" for n in range(job.config.shards)]
    assert list(read.lanes) == [*shards, *sorted(workers)]
    for worker, count in recorded(job).items():
        assert count == settings.get("rounds", 6)
        lane = read.lanes[worker]
        assert len({s.facts["round"] for s in lane}) == count
        _one_after_the_other(lane)
        assert all({"version", "round", "clock"} <= set(s.facts) for s in lane)
        assert all(s.facts["bytes"] > 0 for s in lane if s.name in ("fetch", "push"))
    for shard in shards:
        made = [s for s in read.lanes[shard] if not s.depth]
        assert sorted(s.facts["version"] for s in made) == list(range(1, job.state().version + 1))
        _one_after_the_other(made)
        _one_after_the_other([s for s in read.lanes[shard] if s.depth])
        for s in made:
            inside = [p for p in read.lanes[shard] if p.depth and p.facts["version"] == s.facts["version"]]
            assert (inside[0].start, inside[-1].end) == pytest.approx((s.start, s.end), abs=EXACT_US)
    _flows_are_those_of_the_log(job, read)


def _one_after_the_other(lane: list[Slice]) -> None:
    assert lane
    for before, after in pairwise(sorted(lane, key=lambda s: s.start)):
        assert before.end <= after.start + EXACT_US, f"{before} and {after} overlap"


def _flows_are_those_of_the_log(job: Job, read: Read) -> None:
    versions, shards = versions_of(job), job.config.shards
    pushes = [(a, b) for a, b in read.flows.values() if a.name == "push"]
    for push, made in pushes:
        assert made.name == f"version {versions[push.lane, push.facts['round']]}"
        assert not made.depth
    pushed = [s for lane, slices in read.lanes.items() for s in slices if s.name == "push"]
    assert len(pushes) == len(versions) * shards == len(pushed) * shards
    fetches = [(a, b) for a, b in read.flows.values() if a.name != "push"]
    for commit, fetch in fetches:
        assert (commit.name, fetch.name) == ("commit", "fetch")
        assert commit.facts["version"] == fetch.facts["version"]
        ends = [s.end for n in range(shards) for s in read.lanes[f"shard {n}"] if s.name == commit.name]
        assert commit.end in ends
    fetched = [s for slices in read.lanes.values() for s in slices if s.name == "fetch" and "round" in s.facts]
    assert len(fetches) == len([s for s in fetched if s.facts["version"]])


def test_counters_marks_and_units_are_there(store: Store) -> None:
    job = store.create_job("j", model(), workers=1, units=3)
    with aggregating(job), job.join("w0") as session:
        for loss in (1.0, float("nan"), 0.25):
            assert session.next_unit() is not None
            session.push(gradient(session.pull(), 0, 0), loss=loss)
        await_version(job, 3)
        job.report(2, {"loss": 0.5, "top-5": float("nan")}, by="me")
        job.report(3, {"loss": 0.25}, by="me")
    read = read_perfetto(perfetto_trace(record(job)))
    assert read.counters["loss of w0"] == [1.0, 0.25], "what is no number is left out"
    assert read.counters["staleness of w0"] == [0, 0, 0], "in BSP nothing is stale"
    assert read.instants == {
        "w0": ["join", "leave"],
        "evaluated versions": ["version 2: loss 0.5, top-5 nan", "version 3: loss 0.25"],
    }
    assert {s.facts["unit"] for s in read.lanes["w0"]} == {0, 1, 2}


def test_the_blocks_are_gone_through_as_often_however_many_there_are(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time is written as a distance from the first one, which is looked for once: else 3,000 iterations take
    minutes."""
    found, passes = record(timed_job(store, workers=2, rounds=6)), list[int]()
    blocks = Recording.blocks.fget
    assert blocks
    monkeypatch.setattr(Recording, "blocks", property(lambda self: passes.append(1) or blocks(self)))
    counts = []
    for part in (found.making(6, 6), found):
        passes.clear()
        perfetto_trace(part)
        counts.append(len(passes))
    assert counts[0] == counts[1] > 0


def test_what_became_of_experience_is_marked_in_its_learners_lane(store: Store) -> None:
    with experienced(store) as (policy, *_):
        pass
    read = read_perfetto(perfetto_trace(record(policy.job)))
    assert read.instants == {"shard 0": ["2 trained", "2 rejected", "2 stale"]}
    later = read_perfetto(perfetto_trace(record(policy.job).making(2, 3)))
    assert not later.instants, "all of it was before, or after"
