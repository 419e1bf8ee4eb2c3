"""Finds out what a failover of a shard's server has lost of the present version, and makes it good.

In a cluster the version and its bytes are on servers of their own. A replica that takes its master's place may lack the
last bytes, though the version that names them is committed. The holder still has them, and stores them again. If it is
gone too, the job goes back to the version before.
"""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from typing import NoReturn

from kvps.connection.sockets import ChunkGone
from kvps.errors import CorruptData, LeaseLost, ServerFull, counted
from kvps.job import Job
from kvps.parsing import STAGED_NAME, matching
from kvps.protocol.job_state import Commit, State
from kvps.protocol.worker_states import undone
from kvps_aggregator.shard.mirror import rollback_record
from kvps_aggregator.shard.shard import Shard

log = logging.getLogger("kvps.failover")

_MOST_ENTRIES = 10_000  # joins and leaves since the last commit


class FailoverGuard:
    """Watches the servers of one aggregator's shards on a cluster. Without a cluster it does nothing."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._run_ids: dict[int, str] = {}
        self._next_check = 0.0

    def check(self, shards: Iterable[Shard]) -> None:
        """Check now and then whether a shard's bytes are on another server than before; if so, store what it lacks.

        A full server is tried again with the next check. Raises ServerLost.
        """
        job, held = self._job, list(shards)
        if not job.access.client.is_cluster or time.monotonic() < self._next_check:
            return
        self._next_check = time.monotonic() + job.config.lease_look_s
        run_ids = job.access.client.run_ids([job.access.keys.slot(shard.number) for shard in held])
        for shard, run_id in zip(held, run_ids, strict=True):
            if self._run_ids.get(shard.number) == run_id:
                continue
            with suppress(ServerFull):
                lost = shard.mend()
                self._run_ids[shard.number] = run_id  # last: if it is cut off, the next check mends
                if lost:
                    log.warning(
                        "job %s: the server of shard %d has lost %s of version %d: stored again",
                        job.name,
                        shard.number,
                        counted(lost, "key"),
                        shard.version,
                    )


def go_back(job: Job, shard: int, term: str, damage: CorruptData) -> NoReturn:
    """Have the job continue from the version before, because of `damage` to the present one: a server of the cluster
    failed over, and the holder that still had the bytes is gone too.

    Raises `damage` if the version before is not whole either; LeaseLost afterwards, because all terms end.
    """
    state = job.state()
    commit, entry_before = _last_commit(job)
    if commit is None or commit.plan.version != state.version:
        raise damage
    fields = job.access.client.call(
        "HMGET", job.access.keys.version, *(f"before:{i}" for i in range(job.layout.shards))
    )
    names = tuple(matching(name, f"the version: before:{i}", *STAGED_NAME) for i, name in enumerate(fields))
    states = job.access.client.call("HGETALL", job.access.keys.states)
    before = _undone(replace(state, names=names, last_entry=entry_before, states=states), commit)
    try:
        job.access.reader.whole(before)
    except (ChunkGone, CorruptData):
        raise damage from None
    record = json.dumps(rollback_record(before) | {"replaces": commit.head})
    rolled_back = job.access.scripts.rollback(term, secrets.token_hex(4), job.config.metadata.memory, shard, record)
    if rolled_back:
        version, lost = rolled_back
        what = counted(lost, "version")
        log.warning("job %s: %s: goes on from version %d; lost the last %s", job.name, damage, version, what)
    raise LeaseLost(f"shard {shard} of job {job.name!r} has to be taken anew")


def _last_commit(job: Job) -> tuple[Commit | None, str]:
    """Return the newest commit in the log, and the id of the entry before it."""
    commit: Commit | None = None
    for entry, fields in job.access.client.call("XREVRANGE", job.access.keys.commits, "+", "-", "COUNT", _MOST_ENTRIES):
        if commit:
            return commit, str(entry)
        if fields.get("kind") == "commit":
            commit = Commit.of(fields)
    return commit, "0-0"


def _undone(state: State, commit: Commit) -> State:
    """Return the state as it was before its last commit. The names, and the end of the log, stay as given."""
    plan = commit.plan
    counted, over = Counter(c.worker for c in plan.contributions), Counter(c.worker for c in plan.rejected)
    clock = {worker: count - counted[worker] for worker, count in state.clock.items()}
    members = {
        worker: replace(member, clock=clock.get(worker, 0), skip=member.skip - over[worker])
        for worker, member in state.members.items()
    }
    units = dict(state.units)
    for unit in (c.unit for c in plan.contributions if c.unit is not None):
        units |= {str(unit): "free", "done": str(int(units["done"]) - 1)}
    state = replace(state, states=undone(state.states, plan.version))
    return replace(state, version=plan.version - 1, head=plan.head, clock=clock, members=members, units=units)
