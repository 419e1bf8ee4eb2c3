"""Finds the bytes that nobody will ever want and no living process will free.

A worker killed while it sends leaves chunks that were never accepted; a holder killed while it stages leaves a
version that is never committed; and what a dead process's connection still held may land at any time later. What a
worker stored when it left is dead once it has come back and pushed. So who holds a shard looks now and then at all keys
in its slot. Names are never used twice: what is dead stays dead.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from kvps.job import Job
from kvps.protocol.job_state import Member
from kvps_aggregator.shard.shard import Shard


def sweep(job: Job, shards: Iterable[Shard]) -> None:
    """Note what is dead in the slots of these shards, for their next `free`."""
    keys = sorted(job.client.scan(job.keys.all_bytes))
    segments = job.transport.names()
    if not keys and not segments:
        return
    # Read behind the keys: what is in the inbox now, or may still be accepted, covers every gradient seen before.
    state = job.state()
    over = job.config.units > 0 and state.units_done == job.config.units  # nothing more may come
    members = {} if over else state.members
    waiting = {(c.worker, c.incarnation, c.seq) for c in job.inbox()}
    for shard in shards:
        mine = [key for key in keys if key.startswith(job.keys.slot(shard.number))]
        slot, live = job.keys.slot(shard.number), shard.storage.live_names()
        shard.storage.bury(list(dead(mine, live, members, waiting)))
        gone = dead([slot + name for name in segments], live, members, waiting)
        shard.storage.bury_segments([key.removeprefix(slot) for key in gone if not _may_be_reused(key, members)])


def _may_be_reused(key: str, members: Mapping[str, Member]) -> bool:
    """Whether a segment is of a worker that is there, and that writes its dead ones anew."""
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
    """Those of a slot's keys that are neither of a live version, nor of a contribution that waits or may come, nor of a
    residual that somebody may go on with. Pure."""
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
    """Whether a gradient may still be accepted; or whether a residual is that of one who has left, or is leaving."""
    there = member.active and member.incarnation == incarnation
    if kind == "g":
        return there and seq > member.accepted
    return member.residual.startswith(f"{incarnation}:{seq}:") or (there and seq == member.accepted)
