"""Spans as they are read: they tile a lane without overlap, and what another program wrote is refused in one line."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from helpers.harness import aggregating, await_version, gradient, model
from hypothesis import given
from hypothesis import strategies as st
from kvps_monitor.spans import Iteration, ShardVersion, Span, Traces, spans

import kvps
from kvps.protocol.phases import WORKER_PHASES
from kvps.store import Store

AN_ITERATION = {"round": "3", "version": "2", "clock": "3", "pulled": "40", "pushed": "20", "at": "1000000"}
A_VERSION = {"version": "3", "contributions": "2", "at": "5", "received": "40", "stored": "80", "square_sum": "1.5"}


def iteration(**changed: str) -> Iteration:
    return Iteration.of("w0", ("1-0", AN_ITERATION | changed))


def test_a_phase_that_took_time_is_a_span() -> None:
    found = list(spans([iteration(wait_ms="1.5", compute_ms="2", push_ms="0.25", unit="7")]))
    assert found == [
        Span("w0", "wait", 1_000_000, 1_001_500, 2, 3, 0, 3, 7),
        Span("w0", "compute", 1_001_500, 1_003_500, 2, 3, 0, 3, 7),
        Span("w0", "push", 1_003_500, 1_003_750, 2, 3, 20, 3, 7),
    ]
    version = ShardVersion.of(1, ("1-0", A_VERSION | {"fetch_ms": "1", "commit_ms": "2"}))
    assert list(spans([version])) == [
        Span("shard 1", "fetch", 5, 1005, 3, 0, 40),
        Span("shard 1", "commit", 1005, 3005, 3, 0, 0),
    ]


@given(st.lists(st.tuples(st.integers(-3000, 3000), st.lists(st.integers(0, 5000), min_size=5, max_size=5))))
@pytest.mark.slow
def test_spans_never_overlap_however_the_clock_is_corrected(steps: list[tuple[int, list[int]]]) -> None:
    at, iterations = 10**9, []
    for correction, micros in steps:
        phases = {f"{p}_ms": f"{m / 1000}" for p, m in zip(WORKER_PHASES, micros, strict=True)}
        iterations.append(iteration(at=str(at + correction), **phases))
        at += sum(micros)
    found = list(spans(iterations))
    assert all(span.end_us > span.start_us for span in found)
    assert all(a.end_us <= b.start_us for a, b in pairwise(found))


def test_without_times_there_are_no_spans() -> None:
    known = Iteration.of("w0", ("1-0", {"round": "1", "version": "0", "loss": "nan"}))
    assert (known.at_us, list(spans([known])), known.loss != known.loss) == (None, [], True)


@pytest.mark.parametrize(
    "changed",
    [
        {"square_sum": "inf"},
        {"stored": "-5"},
        {"step_ms": "-0.1"},
        {"round": "-1"},
        {"round": "1e3"},
        {"at": "99999999999999999"},
        {"wait_ms": "nan"},
        {"wait_ms": "1e300"},
        {"loss": "\x1b[2J"},
        {"clock": ""},
        {"unit": "1.5"},
        {"pulled": "9" * 30},
    ],
)
def test_what_is_no_iteration_or_version_is_refused_in_one_line(changed: dict[str, str]) -> None:
    of_shard = changed.keys() <= {"square_sum", "stored", "step_ms"}
    with pytest.raises(kvps.CorruptData, match="shard 4" if of_shard else "w0") as caught:
        ShardVersion.of(4, ("1-0", A_VERSION | changed)) if of_shard else iteration(**changed)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.slow
def test_each_entry_is_read_once(store: Store, first: int) -> None:
    job = store.create_job("j", model(), shards=2)
    traces = Traces(job, first)
    seen: dict[str, list[Any]] = {"rounds": [], "versions": []}

    def read() -> None:
        iterations, versions = traces.read(["w0", "nobody"])
        assert iterations["nobody"] == []
        seen["rounds"] += [i.round for i in iterations["w0"]]
        seen["versions"] += [(v.shard, v.version) for shard in (0, 1) for v in versions[shard]]

    with aggregating(job), job.join("w0") as session:
        for number in range(6):
            session.push(gradient(session.pull(), 0, number))
            await_version(job, number + 1)
            if number in (3, 4):
                read()
    read()
    read()
    last = range(1, 7)  # the trace of a round comes with the next push: three were there at the first reading
    assert seen["rounds"] == [n for n in last if not first or n > 3 - first]
    assert {version for _, version in seen["versions"]} >= {5, 6}
    assert len(seen["versions"]) == len(set(seen["versions"]))
