"""What the API says of jobs: values for JSON. What somebody looks at already is answered without Redis."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import islice
from typing import Any

from kvps.errors import InvalidSetting, JobNotFound
from kvps.history.events import Event, EventLog
from kvps.job import readable
from kvps.protocol.phases import SHARD_PHASES, WORKER_PHASES
from kvps.store import Store
from kvps_monitor.dashboard.frames import Look
from kvps_monitor.jobs import summary, unreadable
from kvps_monitor.live import JobWatch
from kvps_monitor.spans import Iteration, ShardVersion, Span
from kvps_monitor.spans import spans as recorded
from kvps_monitor.views import JobView, event_json

MOST_EVENTS = 200
"""The most events in one answer."""
MOST_LANES = 64
"""The most lanes of a timeline in one answer."""
_SEARCHED = 4_000  # events of the log that are searched for some of them
_PAGE = 50
_LARGEST_PAGE = 1_000
_LONGEST_MS = 60_000  # of a timeline


def job_list(store: Store) -> list[dict[str, Any]]:
    """Return all jobs of the server by name; one that cannot be read has a reason. Raises ServerLost."""
    return list(store.read_jobs(summary, unreadable))


Lane = Sequence[Iteration] | Sequence[ShardVersion]
Kept = tuple[Mapping[str, Sequence[Iteration]], Mapping[int, Sequence[ShardVersion]]]


def seen(store: Store, name: str, look: Look | None) -> tuple[JobView, Kept]:
    """Return a job as it is now, and what is kept of its traces: those of the newest look at it, if there is one.
    Raises JobNotFound, CorruptData, ServerLost."""
    if look:
        return look.view, (look.iterations, look.versions)
    with readable(name):
        watch = JobWatch(store.job(name))
        return watch.look(), watch.kept()


def events_before(
    store: Store, name: str, before: str, count: int, worker: str | None, kinds: Collection[str] = ()
) -> dict[str, Any]:
    """Return `count` events of the log before the entry `before`, newest first, each with its id; and under "before"
    where to go on, None at the beginning of what Redis has. With `worker` only its own, and with `kinds` only those:
    some pages are searched for them, and there may be fewer than `count` or none while there are older ones. Raises as
    `seen`, InvalidSetting."""
    if not 1 <= count <= MOST_EVENTS:
        raise InvalidSetting(f"count must be from 1 to {MOST_EVENTS}, not {count}")
    with readable(name):
        job = store.job(name)
        log = EventLog(job.access.client, job.access.keys)
        if worker is None and not kinds:
            page = log.before(before, count)
            return _page(page, page[0][0] if len(page) >= count else None, worker)
        chosen = list[tuple[str, Event]]()
        size, searched = max(count, _PAGE), 0
        while searched < _SEARCHED:
            page = log.before(before, size)
            searched += len(page)
            kept = [(id, event) for id, event in page if not kinds or event.kind in kinds]
            chosen = [*((id, event) for id, event in kept if worker is None or _concerns(event, worker)), *chosen]
            if len(page) < size:
                return _page(chosen, None, worker)
            before = page[0][0]
            if len(chosen) >= count:
                break
            size = min(2 * size, _LARGEST_PAGE)
        return _page(chosen, before, worker)


def _page(page: Sequence[tuple[str, Event]], before: str | None, worker: str | None) -> dict[str, Any]:
    """Return events, newest first. Those of one worker have its contributions alone."""
    own = None if worker is None else lambda each: [c for c in each if c["worker"] == worker]
    return {"events": [{"id": id} | event_json(event, own) for id, event in reversed(page)], "before": before}


def _concerns(event: Event, worker: str) -> bool:
    facts = event.facts
    named = [*facts.get("contributions", ()), *facts.get("rejected", ()), facts]
    return any(each.get("worker") == worker for each in named)


# -- timelines --------------------------------------------------------------------------------------------------------


def spans(view: JobView, kept: Kept, first: int, count: int, after_ms: float) -> dict[str, Any]:
    """Return the spans of lanes `first` to `first + count - 1` that end after `after_ms`, and not a minute or more
    before the newest of all. The shards are the first lanes, then come the workers by rank. A span is [phase, start,
    milliseconds, version, round, bytes], where start is in milliseconds after `base_ms`. Raises InvalidSetting."""
    if first < 0 or not 1 <= count <= MOST_LANES:
        raise InvalidSetting(f"first must be 0 or more, and count from 1 to {MOST_LANES}")
    iterations, versions = kept
    shards = {f"shard {n}": (versions[n], SHARD_PHASES) for n in sorted(versions)}
    workers = {w.worker: (iterations.get(w.worker, ()), WORKER_PHASES) for w in view.workers}
    lanes: dict[str, tuple[Lane, Sequence[str]]] = {**shards, **workers}
    traces: list[Lane] = [*iterations.values(), *versions.values()]
    ends = [_end_ms(trace[-1]) for trace in traces if trace]
    base_ms = max(after_ms, min(view.at_ms, max(ends, default=view.at_ms)) - _LONGEST_MS)
    rows = []
    for name, (lane, phases) in islice(lanes.items(), first, first + count):
        late = [s for s in recorded(each for each in lane if _end_ms(each) > base_ms) if s.end_us > 1000 * base_ms]
        rows.append({"lane": name, "spans": [_span(s, phases, base_ms) for s in late]})
    return {"at_ms": view.at_ms, "base_ms": base_ms, "first": first, "all": len(lanes), "lanes": rows}


def _end_ms(each: Iteration | ShardVersion) -> float:
    return each.ended_us / 1000 if each.at_us else 0.0


def _span(s: Span, phases: Sequence[str], base_ms: float) -> list[Any]:
    start_ms = round(s.start_us / 1000 - base_ms, 2)
    return [phases.index(s.phase), start_ms, round((s.end_us - s.start_us) / 1000, 2), s.version, s.round, s.bytes]


def worker_iterations(view: JobView, kept: Kept, worker: str) -> dict[str, Any]:
    """Return the last iterations of a worker, newest first. Raises JobNotFound if the job has no such worker."""
    if all(w.worker != worker for w in view.workers):
        raise JobNotFound(f"the job has no worker {worker[:64]!r}")
    fields = ("round", "version", "clock", "at_us", "pulled", "pushed", "unit", "loss")
    rows = [
        {name: getattr(i, name) for name in fields} | {"phases": list(i.phases.values())}
        for i in reversed(kept[0].get(worker, ()))
    ]
    return {"worker": worker, "phases": WORKER_PHASES, "iterations": rows}
