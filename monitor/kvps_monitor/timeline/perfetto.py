"""Writes a recording as a Perfetto trace: a track for each worker and each shard, flows between them, counters, and a
track of evaluations.

Times are nanoseconds from the recording's origin. A snapshot of two clocks tells the viewer what time of day that was.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import (
    BUILTIN_CLOCK_BOOTTIME,
    BUILTIN_CLOCK_REALTIME,
    TrackDescriptor,
    TrackEvent,
)
from perfetto.trace_builder.proto_builder import TraceProtoBuilder

from kvps.history.events import Event
from kvps_monitor.spans import Span
from kvps_monitor.timeline.recording import EVALUATIONS, Block, Recording

_SEQUENCE = 1
_STATE_CLEARED = 1  # SEQ_INCREMENTAL_STATE_CLEARED: the sequence begins here


def perfetto_trace(recording: Recording) -> bytes:
    """Return the recording as the bytes of a `.perfetto-trace` file."""
    writer = _Writer(recording)
    writer.begin()
    for shard, lane in enumerate(recording.shards):
        writer.shard(f"shard {shard}", lane, recording.fates if shard == 0 else ())
    for worker, lane in recording.workers.items():
        writer.worker(worker, lane)
    if recording.evaluations:
        writer.evaluations()
    return bytes(writer.builder.serialize())


class _Writer:
    """Writes packets one after the other. A track has the number of its descriptor as its id."""

    def __init__(self, recording: Recording) -> None:
        self.builder = TraceProtoBuilder()
        self._recording = recording
        self._tracks = 0
        self._root = 0
        self._out: dict[Span | Block, list[int]] = defaultdict(list)  # what arrows begin at -> their ids
        self._into: dict[Span | Block, list[int]] = defaultdict(list)
        for id, arrow in enumerate(recording.arrows(), 1):
            # A push leads to the version as a whole; what a worker fetches comes from its last phase, the commit.
            pushed = arrow.kind == "push"
            self._out[arrow.span if pushed else arrow.shard.spans[-1]].append(id)
            self._into[arrow.shard if pushed else arrow.span].append(id)

    def begin(self) -> None:
        """Write the clocks, and the track that all others are under."""
        packet = self._packet()
        packet.sequence_flags = _STATE_CLEARED
        for clock, at in (
            (BUILTIN_CLOCK_BOOTTIME, 0),
            (BUILTIN_CLOCK_REALTIME, round(1000 * self._recording.origin_us)),
        ):
            packet.clock_snapshot.clocks.add(clock_id=clock, timestamp=at)
        self._root = self._track(f"job {self._recording.job}, {self._recording.mode}", 0)

    def shard(self, name: str, lane: Sequence[Block], fates: Sequence[Event]) -> None:
        """Write a shard's track: a slice for each version, its phases inside, and an instant for each of `fates`."""
        track = self._track(name, self._root)
        for block in lane:
            facts = {"version": block.number}
            self._open(track, block, f"version {block.number}", facts)
            for span in block.spans:
                self._slice(track, span, facts | {"bytes": span.bytes})
            self._event(track, block.end_us, TrackEvent.TYPE_SLICE_END)
        for each in fates:
            kind, items = ("trained", "trained") if each.kind == "commit" else (each.kind, "items")
            self._event(track, 1000 * each.at_ms, TrackEvent.TYPE_INSTANT, f"{each.facts[items]:,} {kind}")

    def worker(self, name: str, lane: Sequence[Block]) -> None:
        """Write a worker's track, and the counters of its loss and staleness."""
        track = self._track(name, self._root)
        for block in lane:
            for span in block.spans:
                self._slice(track, span, block.facts | ({"bytes": span.bytes} if span.bytes else {}))
        for mark in self._recording.marks:
            if mark.worker == name:
                self._event(track, mark.at_us, TrackEvent.TYPE_INSTANT, mark.kind)
        for what, curve in self._recording.curves(name).items():
            if curve:
                counter = self._track(f"{what} of {name}", track, counter=True)
                for at_us, value in curve:
                    self._event(counter, at_us, TrackEvent.TYPE_COUNTER).double_counter_value = float(value)

    def evaluations(self) -> None:
        """Write the track of evaluations: an instant for each."""
        track = self._track(EVALUATIONS, self._root)
        for evaluation in self._recording.evaluations:
            event = self._event(track, 1000 * evaluation.at_ms, TrackEvent.TYPE_INSTANT, str(evaluation))
            event.debug_annotations.add(name="by", string_value=evaluation.by)
            for figure, value in evaluation.figures.items():
                event.debug_annotations.add(name=figure, double_value=value)

    def _slice(self, track: int, span: Span, facts: dict[str, int]) -> None:
        self._open(track, span, span.phase, facts)
        self._event(track, span.end_us, TrackEvent.TYPE_SLICE_END)

    def _open(self, track: int, what: Span | Block, name: str, facts: dict[str, int]) -> None:
        event = self._event(track, what.start_us, TrackEvent.TYPE_SLICE_BEGIN, name)
        event.flow_ids.extend(self._out[what])
        event.terminating_flow_ids.extend(self._into[what])
        for fact, value in facts.items():
            event.debug_annotations.add(name=fact, int_value=value)

    def _event(self, track: int, at_us: float, kind: int, name: str = "") -> Any:
        packet = self._packet()
        packet.timestamp = round(1000 * (at_us - self._recording.origin_us))
        event = packet.track_event
        event.type, event.track_uuid = kind, track
        if name:
            event.name = name
        return event

    def _track(self, name: str, parent: int, counter: bool = False) -> int:
        self._tracks += 1
        track = self._packet().track_descriptor
        track.uuid, track.name, track.child_ordering = self._tracks, name, TrackDescriptor.EXPLICIT
        track.sibling_order_rank = self._tracks
        if parent:
            track.parent_uuid = parent
        if counter:
            track.counter.SetInParent()
        return self._tracks

    def _packet(self) -> Any:
        packet = self.builder.add_packet()
        packet.trusted_packet_sequence_id = _SEQUENCE
        return packet
