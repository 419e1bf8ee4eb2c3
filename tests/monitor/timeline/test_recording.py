"""What is read of a job's time: whole runs, windows, arrows, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from helpers.harness import aggregating, gradient, model
from helpers.internals import abandon
from helpers.timelines import ClockErrors, recorded, timed_job, versions_of
from kvps_monitor.timeline.recording import Recording, record

from kvps.errors import CorruptData, InvalidSetting, JobError
from kvps.session.session import Session
from kvps.store import Store


def test_a_killed_worker_has_one_lane_of_two_incarnations(store: Store) -> None:
    job = store.create_job("j", model(), workers=2, staleness=0)
    with aggregating(job), job.join("w1") as w1:
        killed = job.join("w0")
        for _ in range(6):
            _push(killed, w1)
        abandon(killed)
        with job.join("w0", takeover=True) as again:
            for _ in range(10):
                _push(again, w1)
        w1.leave()
        job.await_finished()
    found = record(job)
    rounds = [block.number for block in found.workers["w0"]]
    assert len(rounds) == recorded(job)["w0"]
    assert rounds == sorted(set(rounds))
    told_by_nobody = set(range(1, 17)) - set(rounds)
    last = max(told_by_nobody)
    assert last in (6, 7), "a later push would have told of its last iterations"
    assert told_by_nobody == set(range(min(told_by_nobody), last + 1))
    assert [mark.kind for mark in found.marks if mark.worker == "w0" and mark.kind == "join"] == ["join"] * 2
    joined = [mark.at_us for mark in found.marks if mark.worker == "w0" and mark.kind == "join"]
    assert any(block.end_us < joined[1] for block in found.workers["w0"])
    assert any(block.start_us > joined[1] - 1000 for block in found.workers["w0"])
    log = versions_of(job)
    for arrow in found.arrows():
        if arrow.kind == "push":
            assert arrow.shard.number == log[arrow.worker.lane, arrow.worker.number]


def _push(*sessions: Session) -> None:
    for session in sessions:
        session.push(gradient(session.pull(), session.rank, session.round))


def test_arrows_go_forward_in_time(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = ClockErrors(monkeypatch)
    job = timed_job(store, staleness=1)
    arrows = list(record(job).arrows())
    assert {arrow.kind for arrow in arrows} == {"push", "fetch"}
    for arrow in arrows:
        if arrow.kind == "push":
            assert arrow.span.start_us < arrow.shard.end_us + errors.apart_us
        else:
            assert arrow.shard.start_us < arrow.span.end_us + errors.apart_us


def _numbers(found: Recording, worker: str) -> list[int]:
    return [block.number for block in found.workers[worker]]


def test_windows(store: Store) -> None:
    found = record(timed_job(store, rounds=8, staleness=0))
    part = found.making(3, 5)
    assert {3, 4, 5} <= set(part.versions)
    # in BSP round n makes version n; an aggregator that must wait for a processor ends version 1 in round 3
    begin = min(lane[2].start_us for lane in found.workers.values())
    end = max(lane[4].end_us for lane in found.shards)
    beside = {block.number for lane in found.shards for block in lane if block.end_us > begin and block.start_us < end}
    assert set(part.versions) == beside, "only what was made at the time is there too"
    assert all({3, 4, 5} <= set(_numbers(part, w)) for w in part.workers)
    assert found.making(3, None).versions[-1] == 8
    assert found.making(None, 2).versions[0] == 1
    with pytest.raises(InvalidSetting, match="no spans of versions 9 to 12: its traces have versions 1 to 8"):
        found.making(9, 12)
    last = found.last((found.end_us - found.workers["w0"][5].end_us) / 1e6)
    assert _numbers(last, "w0") == [7, 8]
    assert len(_numbers(found.newest_rounds(3), "w0")) <= 4
    first_end = min(blocks[-1].end_us for blocks in found.workers.values())  # of workers, where the window ends
    begun = [block.number for block in found.workers["w0"] if block.start_us <= first_end]
    assert _numbers(found.newest_rounds(100), "w0") == begun
    for seconds in (1e300, float("inf"), 3600):
        assert found.last(seconds).window == (found.start_us, found.end_us), "an axis is not longer than the run"


def test_evaluations_belong_to_the_time_when_they_were_reported(store: Store) -> None:
    job = timed_job(store, rounds=8, pause_ms=10, staleness=0)
    assert record(job).evaluations == []
    reports = [job.report(version, {"loss": 1 / version}, by="me") for version in (4, 8)]
    found = record(job)
    assert found.evaluations == reports

    def at(at_us: float) -> Recording:
        """The same with the last one at another time."""
        early = reports[0]._replace(at_ms=round(found.workers["w0"][3].end_us / 1000))
        return replace(found, evaluations=[early, reports[1]._replace(at_ms=round(at_us / 1000))])

    end_us = found.end_us
    assert [e.version for e in at(end_us + 1e6).making(3, 5).evaluations] == [4]
    whole = at(end_us + 10_000).newest_rounds(8)
    assert [e.version for e in whole.evaluations] == [4, 8]
    assert whole.window
    assert whole.window[1] == 1000 * whole.evaluations[-1].at_ms
    late = at(end_us + 9e6).newest_rounds(8)
    assert [e.version for e in late.evaluations] == [4]
    assert late.window == replace(found, evaluations=[]).newest_rounds(8).window, (
        "rounds fill at least half of a figure"
    )
    assert at(found.start_us - 500_000).origin_us < found.start_us


def test_the_newest_rounds_are_not_those_of_a_worker_that_left_long_ago(store: Store) -> None:
    """Its lane ends before those of the others begin that Redis still has."""
    found = record(timed_job(store, workers=2, rounds=12, staleness=-1))
    gone, rest = found.workers["w0"][:2], found.workers["w1"][6:]
    shift_us = 9e9
    later = [
        b._replace(spans=tuple(s._replace(start_us=s.start_us + shift_us, end_us=s.end_us + shift_us) for s in b.spans))
        for b in rest
    ]
    kept = replace(found, workers={"w0": gone, "w1": later}).newest_rounds(3)
    assert _numbers(kept, "w1") == [10, 11, 12]
    assert _numbers(kept, "w0") == []


def test_a_job_without_spans_is_refused(store: Store) -> None:
    with pytest.raises(JobError, match="has no spans yet"):
        record(store.create_job("new", model()))


A_TRACE = {"round": 3, "version": 2, "at": 1_700_000_000_000_000, "compute_ms": 1}
AN_EVALUATION = {"version": 2, "figures": '{"loss": 1}', "by": "me", "at_ms": 9_000_000_000_000}


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (A_TRACE | {"at": "9" * 16}, "after the year 2250"),
        (A_TRACE | {"round": "x"}, "round must be"),
        (AN_EVALUATION, "after the year 2250"),
    ],
)
def test_a_corrupt_entry_is_one_line(store: Store, entry: dict[str, Any], words: str) -> None:
    job = timed_job(store, workers=1, rounds=2)
    key = job.access.keys.evaluations if "figures" in entry else job.access.keys.trace("w0")
    job.access.client.call("XADD", key, "*", *(x for pair in entry.items() for x in pair))
    with pytest.raises(CorruptData, match=words):
        record(job)
