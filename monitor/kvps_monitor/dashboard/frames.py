"""What is sent to a page that looks at a job: everything once, and then only what has changed.

A frame says what changed since an earlier look, whichever that was. So a slow viewer is sent fewer frames, and lacks
nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

from kvps.history.rollouts import ActorNow
from kvps.parsing import json_of
from kvps.protocol.phases import SHARD_PHASES, WORKER_PHASES
from kvps_monitor.dashboard.history import Snapshot
from kvps_monitor.spans import Iteration, ShardVersion
from kvps_monitor.views import JobView, ShardView, WorkerView, event_json


def _fields(view: type, *without: str) -> tuple[str, ...]:
    return tuple(field.name for field in fields(view) if field.name not in without)


WORKER_FIELDS = (*_fields(WorkerView, "state_s", "silent_s", "losses"), "since_ms")
_OF_JOB = (
    "evaluation_text",
    "published_by",
    *_fields(JobView, "at_ms", "workers", "shards", "standbys", "events", "evaluation", "gradient_norms", "losses"),
)
_OF_SHARD = _fields(ShardView, "phases")
_ACTORS = 100
"""How many actors a frame has; `kvps rollouts` has all."""
_SILENT_S = 5  # a sign of life comes more often: a row changes only if its actor has sent something, or is silent
_NAMED = 6
"""How many contributions of a version an event has in a frame; `/log` has all."""


@dataclass(frozen=True)
class Trouble:
    """Why there is nothing to see of a job. `kind` is gone, lost or unreadable."""

    number: int
    kind: str
    message: str


@dataclass(frozen=True)
class Look:
    """One look at a job, with what the looks before it left for charts and timelines. Looks are numbered from 1.

    first  the number of the first look at this job: after a loss of the server, say, all begins anew
    """

    number: int
    first: int
    view: JobView = field(repr=False)
    series: dict[str, Snapshot] = field(repr=False)
    iterations: dict[str, list[Iteration]] = field(repr=False)
    versions: dict[int, list[ShardVersion]] = field(repr=False)

    @cached_property
    def facts(self) -> dict[str, Any]:
        """The facts of the job itself, and of the experience that it takes."""
        now = self.view.rollouts
        actors = [_actor_row(actor) for actor in now.actors[:_ACTORS]] if now else []
        experience = {"rollouts": now and now.brief, "actors": actors}
        return {name: _short(getattr(self.view, name)) for name in _OF_JOB} | experience

    @cached_property
    def rows(self) -> list[list[Any]]:
        """The workers by rank, each as the values of `WORKER_FIELDS`."""
        return [_worker_row(w, self.view.at_ms) for w in self.view.workers]

    @cached_property
    def shards(self) -> list[dict[str, Any]]:
        """The shards."""
        return [_shard_row(s) for s in self.view.shards]

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        """The newest events, oldest first, with at most a few contributions each."""
        return [event_json(event, lambda each: each[:_NAMED]) for event in self.view.events]


def frame(before: Look | None, now: Look | Trouble, worker: str | None = None) -> bytes:
    """Return what a viewer that has seen `before` needs to see `now`, as an event of the stream. With `worker`, only
    that worker's row is in it."""
    if isinstance(now, Trouble):
        return as_event({"n": now.number, "trouble": now.kind, "message": now.message})
    if before and before.first != now.first:
        before = None
    parts: dict[str, Any] = {"n": now.number, "at_ms": now.view.at_ms}
    if before is None:
        parts |= {"full": True, "fields": WORKER_FIELDS, "phases": {"worker": WORKER_PHASES, "shard": SHARD_PHASES}}
    old = before.facts if before else {}
    parts["job"] = {name: value for name, value in now.facts.items() if name not in old or old[name] != value}
    parts |= _rows(before, now, worker)
    if before is None or before.shards != now.shards:
        parts["shards"] = now.shards
    seen = before.events if before else []
    parts["events"] = [event for event in now.events if event not in seen]
    parts["series"] = {name: part for name, new in now.series.items() if (part := _points(before, new))}
    return as_event(parts)


def as_event(value: dict[str, Any]) -> bytes:
    """Return a message of server-sent events."""
    return b"data: " + as_json(value) + b"\n\n"


def as_json(value: Any) -> bytes:
    """Return JSON in as few bytes as it can be; numbers that JSON has not are null."""
    return json_of(value, (",", ":")).encode()


def _rows(before: Look | None, now: Look, worker: str | None) -> dict[str, Any]:
    """Return all rows under "workers", or what changed in them under "changes": [row, field, value, field, value, ...].
    Workers keep their places: a row that is new or another worker's makes all be sent."""
    old = _chosen(before.rows, worker) if before else []
    new = _chosen(now.rows, worker)
    if before is None or [row[0] for row in old] != [row[0] for row in new]:
        return {"workers": new}
    changes = []
    for place, (was, row) in enumerate(zip(old, new, strict=True)):
        if was != row:
            changes.append([place, *(x for n, value in enumerate(row) if was[n] != value for x in (n, value))])
    return {"changes": changes} if changes else {}


def _chosen(rows: list[list[Any]], worker: str | None) -> list[list[Any]]:
    return rows if worker is None else [row for row in rows if row[0] == worker]


def _points(before: Look | None, new: Snapshot) -> dict[str, Any] | None:
    """Return the points of a series that are new or changed; None if none are. With "all" they are the whole series."""
    since = before.number if before else 0
    if before is None or new.rewritten > since:
        return {"all": True, "points": [[p.x, *map(_short, p.values)] for p in new.points]}
    points = [[p.x, *map(_short, p.values)] for p in new.points if p.look > since]
    return {"points": points} if points else None


def _worker_row(w: WorkerView, at_ms: int) -> list[Any]:
    values = {
        "since_ms": None if w.state_s is None else round((at_ms - 1000 * w.state_s) / 100) * 100,
        "shares": [round(share, 2) for share in w.shares.values()],
    }
    return [values[name] if name in values else _short(getattr(w, name)) for name in WORKER_FIELDS]


def _shard_row(s: ShardView) -> dict[str, Any]:
    return {name: _short(getattr(s, name)) for name in _OF_SHARD} | {"phases": [_short(ms) for ms in s.phases.values()]}


def _actor_row(actor: ActorNow) -> dict[str, Any]:
    return actor._asdict() | {"silent_s": int(actor.silent_s) // _SILENT_S * _SILENT_S}


def _short(value: Any) -> Any:
    """Return a number with the digits that a person may see."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.4g}") if math.isfinite(value) else None
