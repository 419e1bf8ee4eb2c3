"""The sweep: finds the bytes that no process will ever want and no living process will free.

A worker killed while it pushes leaves chunks that were never accepted. A holder killed while it stages leaves a version
that is never committed. Bytes that a dead process's connection still held may arrive at any later time. A residual that
a worker stored when it left is dead once the worker has come back and pushed. So the holder of a shard looks now and
then at all keys in its slot. Names are never used twice, so dead bytes stay dead.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from kvps.job import Job
from kvps.protocol.job_state import Member
from kvps_aggregator.shard.shard import Shard


def sweep(job: Job, shards: Iterable[Shard]) -> None:
    """Bury the dead keys and segments of these shards, for their next `free`."""
    keys = sorted(job.client.scan(job.keys.all_bytes))
    segments = job.transport.names()
    if not keys and not segments:
        return
    # Read after the keys: every live gradient among them is in the inbox now, or may still be accepted.
    state = job.state()
    over = job.config.units > 0 and state.units_done == job.config.units  # no more contributions can come
    members = {} if over else state.members
    waiting = {(c.worker, c.incarnation, c.seq) for c in job.inbox()}
    for shard in shards:
        mine = [key for key in keys if key.startswith(job.keys.slot(shard.number))]
        slot, live = job.keys.slot(shard.number), shard.storage.live_names()
        shard.storage.bury(list(dead(mine, live, members, waiting)))
        gone = dead([slot + name for name in segments], live, members, waiting)
        shard.storage.bury_segments([key.removeprefix(slot) for key in gone if not _may_be_reused(key, members)])


def _may_be_reused(key: str, members: Mapping[str, Member]) -> bool:
    """Return whether a segment is an active worker's gradient: workers write their dead segments anew."""
    kind, name = key.split(":")[2:4]
    worker, _, incarnation = name.partition(".")
    member = members.get(worker)
    return bool(kind == "g" and member and member.incarnation == incarnation and member.active)


def dead(
    keys: Iterable[str],
    live_names: Collection[str],
    members: Mapping[str, Member],
    waiting: Collection[tuple[str, str, int]],
) -> Iterator[str]:
    """Yield the keys of a slot that belong to no live version, no contribution that waits or may still come, and no
    residual that an incarnation may still take over. Pure."""
    for key in keys:
        kind, *rest = key.split(":")[2:]
        if kind in ("g", "r"):
            worker, _, incarnation = rest[0].partition(".")
            seq, member = int(rest[1]), members.get(worker)
            alive = _may_come(kind, incarnation, seq, member) if member else False
            if not alive and not (kind == "g" and (worker, incarnation, seq) in waiting):
                yield key
        elif kind not in ("owner", "reserve") and rest[0] not in live_names:
            yield key


def _may_come(kind: str, incarnation: str, seq: int, member: Member) -> bool:
    """Return whether a gradient may still be accepted, or a residual is one of a worker that left or is leaving."""
    there = member.active and member.incarnation == incarnation
    if kind == "g":
        return there and seq > member.accepted
    return member.residual.startswith(f"{incarnation}:{seq}:") or (there and seq == member.accepted)
