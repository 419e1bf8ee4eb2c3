"""Numbers the arrows of a recording: which ids leave a span, and which end at a span or at a shard's version."""

from __future__ import annotations

from collections import defaultdict

from kvps_monitor.spans import Span
from kvps_monitor.timeline.recording import Block, Recording

_Place = tuple[str, str, float]  # lane, phase or "", start


class Flows:
    """The arrows of one recording, each with an id of its own from 1 on. A push leads to the shard's version as a
    whole, and what a worker fetches comes from the commit alone, which is the last phase of a version."""

    def __init__(self, recording: Recording) -> None:
        self._out: dict[_Place, list[int]] = defaultdict(list)
        self._into: dict[_Place, list[int]] = defaultdict(list)
        for id, arrow in enumerate(recording.arrows(), 1):
            if arrow.kind == "push":
                self._out[_place(arrow.span)].append(id)
                self._into[_place(arrow.shard)].append(id)
            else:
                self._out[_place(arrow.shard.spans[-1])].append(id)
                self._into[_place(arrow.span)].append(id)

    def out_of(self, span: Span) -> list[int]:
        """Return the ids of the arrows that begin at a span."""
        return self._out.get(_place(span), [])

    def into(self, target: Span | Block) -> list[int]:
        """Return the ids of the arrows that end at a span, or at a shard's version."""
        return self._into.get(_place(target), [])


def _place(at: Span | Block) -> _Place:
    return at.lane, at.phase if isinstance(at, Span) else "", at.start_us
