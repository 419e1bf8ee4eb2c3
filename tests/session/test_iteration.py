"""Spans of workers: phases add up to the time that passed, and what is recorded is what the server acknowledged."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import numpy as np
import pytest
from helpers.harness import aggregating, await_version, gradient, model
from helpers.waiting import eventually

from kvps.job import Job
from kvps.protocol.phases import WORKER_PHASES as PHASES
from kvps.store import Store

ROUNDS = 6


def trace_of(job: Job, worker: str = "w0") -> list[dict[str, str]]:
    return [fields for _, fields in job.access.client.call("XRANGE", job.access.keys.trace(worker), "-", "+")]


def milliseconds(entries: list[dict[str, str]]) -> float:
    return sum(float(entry[f"{phase}_ms"]) for entry in entries for phase in PHASES)


def trained(job: Job, rounds: int = ROUNDS) -> tuple[float, float]:
    """Train alone, with some sleep in and between rounds. Return the least and the most seconds from the end of the
    first push to that of the last: without these two, and with them."""
    with aggregating(job):
        with job.join("w0") as session:
            times = []
            for number in range(rounds):
                time.sleep(0.01)
                params = session.pull()
                time.sleep(0.02)
                times.append(time.perf_counter())
                session.push(gradient(params, 0, number), loss=1 / (1 + number))
                times.append(time.perf_counter())
        await_version(job, rounds)
    return times[-2] - times[1], times[-1] - times[0]


def test_phases_add_up_and_iterations_follow_each_other_on_the_servers_clock(store: Store) -> None:
    job = store.create_job("j", model())
    before = store.client.seconds()
    least, most = trained(job)
    after = store.client.seconds()
    entries = trace_of(job)
    assert [int(entry["round"]) for entry in entries] == list(range(1, ROUNDS + 1))
    assert 0.99 * least < milliseconds(entries[1:]) / 1000 < 1.01 * most
    assert all(float(entry["compute_ms"]) >= 20 and float(entry["other_ms"]) >= 10 for entry in entries[1:])
    starts = [int(entry["at"]) / 1e6 for entry in entries]
    ends = [start + milliseconds([entry]) / 1e3 for start, entry in zip(starts, entries, strict=True)]
    assert before - 0.05 < starts[0]
    assert ends[-1] < after + 0.05
    gaps = [abs(start - end) for end, start in zip(ends, starts[1:], strict=False)]
    assert median(gaps) < 0.015, "one begins where the last ended, but where a better sample moved the clock"


@pytest.mark.contract
def test_an_entry_has_what_was_acknowledged(store: Store) -> None:
    job = store.create_job("j", model(), units=ROUNDS, gradient_format="bf16", transport="redis")
    clocks = []
    with aggregating(job), job.join("w0") as session:
        while session.next_unit() is not None:
            clocks.append(session.push(gradient(session.pull(), 0, 0)))
    entries = trace_of(job)
    assert [int(entry["clock"]) for entry in entries] == clocks
    assert [int(entry["unit"]) for entry in entries] == list(range(ROUNDS))
    assert {(int(e["pulled"]), int(e["pushed"])) for e in entries} == {(job.layout.nbytes, job.layout.nbytes // 2)}
    assert [int(entry["version"]) for entry in entries] == list(range(ROUNDS))


def test_a_part_moves_its_own_bytes(store: Store) -> None:
    params = {"a": np.zeros(100, np.float32), "b": np.zeros(300, np.float32)}
    job = store.create_job("j", params, parts={"left": "a", "right": "b"}, transport="redis")
    with aggregating(job), job.join("w0") as session:
        for part, name in (("left", "a"), ("right", "b")):
            session.push({name: np.ones_like(session.pull(part)[name])}, part=part)
    assert [(int(e["pulled"]), int(e["pushed"])) for e in trace_of(job)] == [(400, 400), (1200, 1200)]


def test_a_heartbeat_says_what_the_worker_does(store: Store) -> None:
    job = store.create_job("j", model(), workers=2, worker_timeout_ms=500)

    def activity() -> Any:
        return (job.access.client.call("HGET", job.access.keys.activity, "w0") or "").split(" ")

    with job.join("w0") as session:
        assert eventually(lambda: activity()[0] == "other")
        session.pull()
        assert eventually(lambda: activity()[0] == "compute")
        since = int(activity()[1])
        assert 0 < 1e6 * store.client.seconds() - since < 60e6
        session.push(gradient(session.pull(), 0, 0))
        assert eventually(lambda: activity()[0] == "other")
        assert int(activity()[1]) > since


def test_traces_of_many_workers_take_no_more_room(store: Store) -> None:
    """A stream is cut in steps of its inner nodes, so it may be a little longer."""
    few, many = (store.create_job(name, model(), workers=n, staleness=-1) for name, n in (("few", 1), ("many", 1200)))
    for job in (few, many):
        entry = "round 1 version 0"
        joined = job.access.scripts.join("w0", "cafe", "", {"host": "h", "pid": 1, "device": "cpu"})
        for seq in range(1, 400):
            job.access.scripts.push("w0", joined.incarnation, seq, 0, 1, "0" * 16, job.state().history, None, [entry])
            job.access.client.call("DEL", job.access.keys.inbox)
            job.access.client.call("HINCRBY", job.access.keys.clock, "w0", 1)
    assert few.access.client.call("XLEN", few.access.keys.trace("w0")) == 399
    assert 50 <= many.access.client.call("XLEN", many.access.keys.trace("w0")) < 200
