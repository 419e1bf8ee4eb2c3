"""Jobs whose timelines tests look at, and traces read back."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
from helpers.harness import Params, aggregating, await_version, gradient, model, work
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TrackEvent

from kvps.connection.server_clock import ServerClock
from kvps.job import Job
from kvps.session.session import Session
from kvps.store import Store


def timed_job(store: Store, workers: int = 3, rounds: int = 6, pause_ms: int = 3, **settings: Any) -> Job:
    """Train a job in which w0 pauses three times as long as the others, until all is committed."""
    job = store.create_job("j", model(), workers=workers, **settings)

    def step(session: Session, params: Params, round_: int) -> Params:
        time.sleep(pause_ms / 1000 * (1 if session.rank else 3))
        return gradient(params, session.rank, round_)

    with aggregating(job):
        work(job, rounds, step, workers)
        job.await_finished()
    return job


def alternating_job(store: Store, workers: int = 3, rounds: int = 4, pause_ms: int = 20) -> Job:
    """Train in ASP with one push at a time: the next is sent a pause after the one before is committed."""
    job = store.create_job("asp", model(), workers=workers, staleness=-1)
    with aggregating(job):
        sessions = [job.join(f"w{number}") for number in range(workers)]
        for round_ in range(rounds):
            for session in sessions:
                params = session.pull()
                time.sleep(pause_ms / 1000)
                session.push(gradient(params, session.rank, round_))
                await_version(job, round_ * workers + session.rank + 1)
        for session in sessions:
            session.leave()
        job.await_finished()
    return job


class ClockErrors:
    """Notes how wrong the processes of a test may be about the server's clock: on a busy machine by many ms."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._worst_s = 0.0
        micros = ServerClock.micros

        def noted(clock: ServerClock, moment: float) -> int | None:
            at_us = micros(clock, moment)
            self._worst_s = max(self._worst_s, 0.0 if at_us is None else clock.error_s)
            return at_us

        monkeypatch.setattr(ServerClock, "micros", noted)

    @property
    def apart_us(self) -> float:
        """By how many microseconds two clocks may be apart."""
        return 2e6 * self._worst_s


def versions_of(job: Job) -> dict[tuple[str, int], int]:
    """Return (worker, round) -> version, from the commit log itself."""
    return {(c.worker, c.round): commit.version for commit in job.log() for c in commit.plan.contributions}


def recorded(job: Job) -> dict[str, int]:
    """Return how many iterations Redis has of each worker."""
    return {
        worker: int(job.access.client.call("XLEN", job.access.keys.trace(worker))) for worker in job.state().members
    }


# -- traces that are read back ------------------------------------------------------------------------------------


class Slice(NamedTuple):
    """A slice of a lane, in microseconds. `depth` is 1 inside another one."""

    lane: str
    name: str
    start: float
    end: float
    facts: dict[str, int]
    depth: int = 0


@dataclass
class Read:
    """What a trace says: the name of the track above all; its lanes; each flow as the slices from which and to which it
    leads; values of counters, and instants, by lane."""

    title: str = ""
    lanes: dict[str, list[Slice]] = field(default_factory=lambda: defaultdict(list))
    flows: dict[int, tuple[Slice, Slice]] = field(default_factory=dict)
    counters: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    instants: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))


def read_perfetto(content: bytes) -> Read:
    """Read a Perfetto trace back with the classes of its own package."""
    trace, read = Trace.FromString(content), Read()
    names = {p.track_descriptor.uuid: p.track_descriptor.name for p in trace.packet if p.HasField("track_descriptor")}
    read.title = next(iter(names.values()))
    stacks: dict[int, list[tuple[Any, int]]] = defaultdict(list)
    ends: dict[int, dict[str, Slice]] = defaultdict(dict)
    for packet in trace.packet:
        event = packet.track_event
        lane = names.get(event.track_uuid, "")
        if event.type == TrackEvent.TYPE_SLICE_BEGIN:
            stacks[event.track_uuid].append((event, packet.timestamp))
        elif event.type == TrackEvent.TYPE_SLICE_END:
            begin, at = stacks[event.track_uuid].pop()
            facts = {a.name: a.int_value for a in begin.debug_annotations}
            depth = len(stacks[event.track_uuid])
            found = Slice(lane, begin.name, at / 1000, packet.timestamp / 1000, facts, depth)
            read.lanes[lane].append(found)
            for end, ids in (("from", begin.flow_ids), ("to", begin.terminating_flow_ids)):
                for id in ids:
                    assert end not in ends[id], "an id is of one flow"
                    ends[id][end] = found
        elif event.type == TrackEvent.TYPE_COUNTER:
            read.counters[lane].append(event.double_counter_value)
        elif event.type == TrackEvent.TYPE_INSTANT:
            read.instants[lane].append(event.name)
    assert not any(stacks.values()), "each slice ends"
    read.flows = {id: (found["from"], found["to"]) for id, found in ends.items()}
    return read
