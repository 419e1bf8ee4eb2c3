"""Spans of aggregators: one entry a version and shard. Its phases are the time that passed; it has the norm."""

from __future__ import annotations

import math
import threading
import time

import numpy as np
import pytest
from helpers.harness import aggregating, await_version, gradient, model
from kvps_aggregator.shard.spans import ShardTraces, VersionSpans

import kvps
from kvps.arrays.pieces import Buffer
from kvps.connection.server_clock import ServerClock
from kvps.job import Job
from kvps.protocol.phases import SHARD_PHASES
from kvps.protocol.plan import Plan
from kvps.store import Store


def trace_of(job: Job, shard: int) -> list[dict[str, str]]:
    return [fields for _, fields in job.access.client.call("XRANGE", job.access.keys.shard_trace(shard), "-", "+")]


def milliseconds(entry: dict[str, str]) -> float:
    return sum(float(entry[f"{phase}_ms"]) for phase in SHARD_PHASES)


@pytest.mark.contract
@pytest.mark.parametrize("settings", [{}, {"optimizer": kvps.SGD(lr=0.1, clip_norm=1.0)}])
def test_each_version_of_each_shard_is_recorded_once(store: Store, transport: str, settings: dict[str, object]) -> None:
    shards = 2 if transport == "redis" else 1
    job = store.create_job("j", model(), workers=2, shards=shards, transport=transport, **settings)
    norms = []
    with aggregating(job), job.join("w0") as w0, job.join("w1") as w1:
        for round_ in range(5):
            grads = [gradient(session.pull(), rank, round_) for rank, session in enumerate((w0, w1))]
            mean = [(a.astype(np.float64) + b) / 2 for a, b in zip(*(g.values() for g in grads), strict=True)]
            norms.append(math.sqrt(sum(float(np.sum(np.square(each))) for each in mean)))
            for session, each in zip((w0, w1), grads, strict=True):
                session.push(each)
            await_version(job, round_ + 1)
    traces = [trace_of(job, shard) for shard in range(shards)]
    for trace in traces:
        assert [int(entry["version"]) for entry in trace] == [1, 2, 3, 4, 5]
        assert {int(entry["contributions"]) for entry in trace} == {2}
        ends = [int(e["at"]) + 1000 * milliseconds(e) for e in trace]
        assert all(int(e["at"]) >= end - 5000 for e, end in zip(trace[1:], ends, strict=False)), "no overlap"
    received = [sum(int(trace[n]["received"]) for trace in traces) for n in range(5)]
    assert received == [2 * job.layout.nbytes] * 5
    found = [math.sqrt(sum(float(trace[n]["square_sum"]) for trace in traces)) for n in range(5)]
    assert found == pytest.approx(norms, rel=1e-4)


@pytest.mark.parametrize("settings", [{}, {"clip_norm": 0.5}])
def test_buffers_are_not_in_the_norm_of_the_gradient(store: Store, settings: dict[str, float]) -> None:
    """BatchNorm's running statistics are in the contribution, and are no gradient."""
    params = model() | {"running": Buffer(np.zeros(5, np.float32), "average")}
    job = store.create_job("j", params, workers=1, optimizer=kvps.SGD(lr=0.1, **settings))
    with aggregating(job), job.join("w0") as session:
        grads = gradient({k: v for k, v in session.pull().items() if k != "running"}, 0, 0)
        session.push(grads | {"running": np.full(5, 1000, np.float32)})
        await_version(job, 1)
    (entry,) = trace_of(job, 0)
    norm = math.sqrt(sum(float(np.sum(np.square(each, dtype=np.float64))) for each in grads.values()))
    assert math.sqrt(float(entry["square_sum"])) == pytest.approx(norm, rel=1e-4)


PLAN = Plan(1, 1, "h", "h", 1, 0, (), ())


@pytest.fixture
def spans(store: Store) -> VersionSpans:
    """The times of a shard, of which nothing is recorded yet."""
    clock = ServerClock(store.client.seconds)
    clock.sample()
    return VersionSpans(store.create_job("j", model()), 0, clock)


def end(spans: VersionSpans) -> dict[str, str]:
    """End a version, and return its entry."""
    spans.made(12)
    spans.committed(PLAN)
    values = spans.entries.pop().split()
    return dict(zip(values[::2], values[1::2], strict=True))


def test_phases_are_the_time_that_passed_also_on_several_threads(spans: VersionSpans) -> None:
    def chunk() -> None:
        timer = spans.chunk()
        for _ in timer.fetching(iter([np.ones(3, np.float32)])):
            time.sleep(0.02)
        timer.reduced(12.0)
        time.sleep(0.01)
        timer.end()

    for threads in (1, 4):
        began = time.perf_counter()
        spans.begin()
        running = [threading.Thread(target=chunk) for _ in range(threads)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        entry = end(spans)
        assert 25 < milliseconds(entry) <= 1000 * (time.perf_counter() - began)
        assert min(float(entry["reduce_ms"]), float(entry["step_ms"])) > 0
        assert float(entry["square_sum"]) == 12 * threads


@pytest.mark.parametrize("square_sum", [math.inf, math.nan])
def test_what_overflows_is_no_error(spans: VersionSpans, square_sum: float) -> None:
    """A damaged contribution may hold anything until its digest is checked."""
    spans.begin()
    timer = spans.chunk()
    timer.reduced(square_sum)
    timer.end()
    assert end(spans)["square_sum"] == "0"


def test_waiting_for_other_aggregators_to_measure_is_fetching(spans: VersionSpans) -> None:
    spans.begin()
    spans.measured()
    time.sleep(0.03)
    spans.resume()
    entry = end(spans)
    assert 30 <= float(entry["fetch_ms"]) <= milliseconds(entry)


def test_an_entry_is_lost_only_if_the_server_does_not_take_it(store: Store) -> None:
    """It waits for the next write. One that is refused is dropped, and is no error."""
    job = store.create_job("j", model())
    traces, trace = ShardTraces(job), job.access.keys.shard_trace(0)
    spans = traces.of(0)

    def write(at_once: bool) -> None:
        spans.begin()
        spans.made(0)
        spans.committed(PLAN)
        traces.write(at_once)

    for at_once in (True, False, False, True):
        write(at_once)
        assert not at_once or not traces.waiting
    assert len(trace_of(job, 0)) == 4
    store.client.call("DEL", trace)
    store.client.call("SET", trace, "noon")
    write(at_once=True)
    store.client.call("DEL", trace)
    write(at_once=True)
    assert len(trace_of(job, 0)) == 1
