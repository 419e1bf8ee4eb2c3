"""The sweep: finds the bytes that no process will ever want and no living process will free.

An actor that is killed while it puts an item leaves one that was never accepted. A worker killed while it pushes leaves
chunks that were never accepted. A holder killed while it stages leaves a version that is never committed. Bytes that a
dead process's connection still held may arrive at any later time. A residual that a worker stored when it left is dead
once the worker has come back and pushed. So the holder of a shard reads now and then the names of all keys in its slot.
Names are never used twice, so dead bytes stay dead.

A key in the slot whose name kvps does not write is another program's. It is left there, and goes with the job.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterable, Iterator, Mapping

from kvps.job import Job
from kvps.parsing import NAME, STAGED_NAME
from kvps.protocol.job_state import Member
from kvps_aggregator.shard.shard import Shard

_OF_WORKER = re.compile(
    rf"(?P<kind>[grx]):(?P<worker>{NAME.pattern})\.(?P<incarnation>[A-Za-z0-9-]{{1,128}}):(?P<seq>[0-9]{{1,16}})"
    r"(:[0-9]{1,16})?",
    re.ASCII,
)
_OF_VERSION = re.compile(
    rf"([wpms]|opt\.[A-Za-z0-9]{{1,32}}):(?P<name>{STAGED_NAME[0].pattern})(:[0-9]{{1,16}})?", re.ASCII
)


class Sweeper:
    """The sweep of one job's shards, which is due once in the time after which a silent worker is evicted."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._next = 0.0

    @property
    def is_due(self) -> bool:
        """Whether it is time for a sweep."""
        return time.monotonic() >= self._next

    def hasten(self) -> None:
        """Have a sweep be due at once."""
        self._next = 0.0

    def sweep(self, shards: Iterable[Shard]) -> None:
        """Discard the dead keys and segments of these shards: their next `free` deletes them."""
        job = self._job
        self._next = time.monotonic() + job.config.worker_timeout_ms / 1000
        keys = sorted(job.access.client.scan(job.access.keys.all_bytes))
        segments = job.access.transport.names()
        if not keys and not segments:
            return
        # Read after the keys: every live gradient among them is in the inbox now, or may still be accepted.
        state = job.state()
        over = job.config.units > 0 and state.units_done == job.config.units  # no more contributions can come
        members = {} if over else state.members
        waiting = {(c.worker, c.incarnation, c.seq) for c in job.access.reader.inbox()}
        items = job.rollouts.live() if job.config.metadata.rollouts else ()
        for shard in shards:
            slot, live = job.access.keys.slot(shard.number), shard.storage.live_names()
            mine = [key.removeprefix(slot) for key in keys if key.startswith(slot)]
            shard.storage.discard([slot + name for name in dead(mine, live, members, waiting, items)])
            gone = dead(segments, live, members, waiting)
            shard.storage.discard_segments([name for name in gone if not _may_be_reused(name, members)])


def _may_be_reused(name: str, members: Mapping[str, Member]) -> bool:
    """Return whether a segment is an active worker's gradient: workers write their dead segments anew."""
    parts = _OF_WORKER.fullmatch(name)
    member = members.get(parts["worker"]) if parts and parts["kind"] == "g" else None
    return bool(parts and member and member.incarnation == parts["incarnation"] and member.active)


def dead(
    names: Iterable[str],
    live_names: Collection[str],
    members: Mapping[str, Member],
    waiting: Collection[tuple[str, str, int]],
    items: Collection[str] = (),
) -> Iterator[str]:
    """Yield the names of keys or segments in a slot that belong to no live version, no contribution that waits or may
    still come, no residual that an incarnation may still take over, and none of these items of experience. Pure."""
    for name in names:
        if name.startswith("x:"):
            if _OF_WORKER.fullmatch(name) and name[2:].rpartition(":")[0] not in items:
                yield name
        elif parts := _OF_WORKER.fullmatch(name):
            kind, worker, incarnation, seq = parts["kind"], parts["worker"], parts["incarnation"], int(parts["seq"])
            member = members.get(worker)
            alive = _may_come(kind, incarnation, seq, member) if member else False
            if not alive and not (kind == "g" and (worker, incarnation, seq) in waiting):
                yield name
        elif (version := _OF_VERSION.fullmatch(name)) and version["name"] not in live_names:
            yield name


def _may_come(kind: str, incarnation: str, seq: int, member: Member) -> bool:
    """Return whether a gradient may still be accepted, or a residual belongs to a worker that left or is leaving."""
    present = member.active and member.incarnation == incarnation
    if kind == "g":
        return present and seq > member.accepted
    return member.residual.startswith(f"{incarnation}:{seq}:") or (present and seq == member.accepted)
