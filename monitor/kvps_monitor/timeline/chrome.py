"""Writes a recording in the Trace Event Format, the JSON that chrome://tracing and other older viewers read.

Times are microseconds from the recording's origin. A thread stands for each worker and each shard, and one for all
evaluations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from kvps.parsing import json_of
from kvps_monitor.spans import Span
from kvps_monitor.timeline.flows import Flows
from kvps_monitor.timeline.recording import EVALUATIONS, Block, Recording

_PROCESS = 1
_DIGITS = 3  # nanoseconds


def chrome_trace(recording: Recording) -> str:
    """Return the recording as the text of a `.json` file."""
    lanes = _Lanes(recording)
    events = [*lanes.names(), *lanes.blocks(), *lanes.flows(), *lanes.marks(), *lanes.counters()]
    facts = {"job": recording.job, "mode": recording.mode, "origin_us": round(recording.origin_us)}
    return json_of({"traceEvents": events, "displayTimeUnit": "ms", "otherData": facts})


class _Lanes:
    """The events of a recording; each method yields those of one kind."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        shards = [(f"shard {number}", lane) for number, lane in enumerate(recording.shards)]
        evaluations = [(EVALUATIONS, ())] if recording.evaluations else []
        self._lanes: list[tuple[str, Sequence[Block]]] = [*shards, *recording.workers.items(), *evaluations]
        self._threads = {name: thread for thread, (name, _) in enumerate(self._lanes, 1)}

    def names(self) -> Iterator[dict[str, Any]]:
        """Yield the names of the lanes, in their order."""
        title = f"job {self._recording.job}, {self._recording.mode}"
        yield self._event("M", "process_name", 0) | {"args": {"name": title}}
        for name, thread in self._threads.items():
            yield self._event("M", "thread_name", thread) | {"args": {"name": name}}
            yield self._event("M", "thread_sort_index", thread) | {"args": {"sort_index": thread}}

    def blocks(self) -> Iterator[dict[str, Any]]:
        """Yield the spans, and a span for each version of a shard around its phases."""
        for name, lane in self._lanes:
            for block in lane:
                facts = block.facts if name in self._recording.workers else {"version": block.number}
                if name not in self._recording.workers:
                    yield self._complete(name, f"version {block.number}", block, "version") | {"args": facts}
                for span in block.spans:
                    moved = {"bytes": span.bytes} if span.bytes else {}
                    yield self._complete(name, span.phase, span, "phase") | {"args": facts | moved}

    def flows(self) -> Iterator[dict[str, Any]]:
        """Yield the begin and the end of each arrow."""
        for id, arrow in enumerate(Flows(self._recording).arrows, 1):
            shard: Span | Block = arrow.shard if arrow.kind == "push" else arrow.shard.spans[-1]
            source, target = (arrow.span, shard) if arrow.kind == "push" else (shard, arrow.span)
            for kind, at in (("s", source), ("f", target)):
                event = self._event(kind, arrow.kind, self._threads[at.lane]) | {"cat": "flow", "id": id}
                yield event | {"ts": self._time(at.start_us)} | ({"bp": "e"} if kind == "f" else {})

    def marks(self) -> Iterator[dict[str, Any]]:
        """Yield an instant for each worker that joined, left or was evicted, and for each evaluation."""
        for mark in self._recording.marks:
            if mark.worker in self._threads:
                instant = self._event("i", mark.kind, self._threads[mark.worker])
                yield instant | {"s": "t", "ts": self._time(mark.at_us)}
        for evaluation in self._recording.evaluations:
            instant = self._event("i", str(evaluation), self._threads[EVALUATIONS])
            yield instant | {"s": "t", "ts": self._time(1000 * evaluation.at_ms), "args": evaluation.facts}

    def counters(self) -> Iterator[dict[str, Any]]:
        """Yield each worker's losses, and the staleness of its contributions."""
        for name in self._recording.workers:
            for what, curve in self._recording.curves(name).items():
                for at_us, value in curve:
                    counter = self._event("C", f"{what} of {name}", 0)
                    yield counter | {"ts": self._time(at_us), "args": {what: value}}

    def _complete(self, lane: str, name: str, at: Span | Block, category: str) -> dict[str, Any]:
        start, end = self._time(at.start_us), self._time(at.end_us)
        times = {"cat": category, "ts": start, "dur": round(end - start, _DIGITS)}
        return self._event("X", name, self._threads[lane]) | times

    def _event(self, kind: str, name: str, thread: int) -> dict[str, Any]:
        return {"ph": kind, "name": name, "pid": _PROCESS, "tid": thread}

    def _time(self, at_us: float) -> float:
        return round(at_us - self._recording.origin_us, _DIGITS)
