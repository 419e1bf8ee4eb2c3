"""The judgement of a finished job from outside: by its log, its workers' files, its keys and its segments."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event

import numpy as np
from helpers.internals import segments_of
from kvps_aggregator import Aggregator
from kvps_aggregator.verify.replay import prove
from kvps_cli.prove.fault_injection import judge

import kvps.store
from chaos.roles import Recomputed
from kvps.arrays.layout import DTYPE, Array
from kvps.history.commit_log import Log
from kvps.history.log_stream import LogStream
from kvps.job import Job
from kvps.store import Store


@dataclass
class Verdict:
    """The sums over one or more jobs; `problems` is empty if all is as promised."""

    commits: int = 0
    contributions: int = 0
    acknowledged: int = 0
    lost: int = 0
    twice: int = 0
    problems: list[str] = field(default_factory=list)

    def add(self, other: Verdict) -> None:
        for name in ("commits", "contributions", "acknowledged", "lost", "twice"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.problems += other.problems


Ack = tuple[str, str, int]
"""A contribution as its worker knows it: worker, incarnation, sequence number."""


def acknowledged(files: Iterable[Path]) -> set[Ack]:
    """Return the acknowledged contributions that workers have written into their files so far."""
    lines = [line.split() for file in files for line in file.read_text().split("\n")[:-1]]
    return {(worker, incarnation, int(number)) for worker, incarnation, number in lines}


def examine(job: Job, files: list[Path], forgiven: frozenset[Ack] = frozenset()) -> Verdict:
    """Compare a job with what its workers were told. `forgiven` are acknowledged contributions the server itself lost.

    Some of those may still be in the log: their worker repeated the push before it knew of the loss.
    """
    said = judge(files, job)
    logged = [c for commit in job.log() for c in commit.plan.contributions + commit.plan.rejected]
    lost = len(acknowledged(files) - {(c.worker, c.incarnation, c.seq) for c in logged} - forgiven)
    state = job.state()
    flat: Array = np.empty(job.layout.size, DTYPE)
    version = job.access.reader.fetch(state, flat).version
    log = Log(LogStream(job.access), state)
    proof = prove(log, state, job.config, job.layout, (version, flat), Recomputed(job, state))
    problems = [proof.differs] if proof.differs else []
    ends = Counter((c.worker, c.incarnation, c.seq) for c in logged)
    if again := [ack for ack, count in ends.items() if count > 1]:
        problems.append(f"{len(again)} contributions stand in the log more than once, as {again[0]}")
    if lost:
        problems.append(f"{lost} acknowledged contributions are in no commit")
    if lost < said.lost - len(forgiven):
        problems.append(f"the judge of kvps up counts {said.lost} as lost")
    if said.twice:
        problems.append(f"{said.twice} contributions were committed twice")
    problems += late_commits(job)
    if job.config.units:
        units = Counter(c.unit for commit in job.log() for c in commit.plan.contributions)
        missing = set(range(job.config.units)) - set(units)
        twice = sum(count > 1 for count in units.values())
        if missing or twice:
            problems.append(f"units: {len(missing)} missing, {twice} more than once")
    if job.access.client.call("XLEN", job.access.keys.inbox):
        problems.append("contributions still wait in the inbox")
    return Verdict(state.version, proof.contributions, said.acknowledged, lost, said.twice, problems)


def late_commits(job: Job) -> list[str]:
    """Return commits under a term after another term took the shard, and terms with two holders, by server time."""
    takes: dict[str, list[tuple[int, str]]] = {}
    holders: dict[str, set[str]] = {}
    problems = []
    for entry, fields in job.access.client.call("XRANGE", job.access.keys.leases, "-", "+"):
        if fields["kind"] == "take":
            takes.setdefault(fields["shard"], []).append((_ms(entry), fields["term"]))
            holders.setdefault(fields["term"], set()).add(fields["holder"])
    problems += [f"term {term} had {len(who)} holders" for term, who in holders.items() if len(who) > 1]
    for entry, fields in job.access.client.call("XRANGE", job.access.keys.commits, "-", "+"):
        for shard, said in enumerate(fields.get("shards", "").split(",") if fields["kind"] == "commit" else ()):
            term, order = said.split()[0], [t for _, t in takes.get(str(shard), [])]
            if term in order and any(at < _ms(entry) for at, _ in takes[str(shard)][order.index(term) + 1 :]):
                problems.append(f"version {fields['version']} was committed under {term} after another took the shard")
    return problems


def _ms(entry: str) -> int:
    return int(entry.split("-")[0])


def remains(store: Store, job: Job) -> list[str]:
    """Return what is wrong with the keys and segments of an ended job, first while it exists, then once removed."""
    problems = []
    if segments_of(job) and (found := segments_of(job).names()):
        problems.append(f"{len(found)} segments are left of a finished job, as {found[0]}")
    if waiting := [key for key in store.client.scan(job.access.keys.all_bytes) if key.split(":")[2] == "g"]:
        problems.append(f"{len(waiting)} gradients are left behind the last sweep, as {waiting[0]}")
    # A new holder knows only two versions, so everything that its sweep leaves must belong to them.
    aggregator, deadline = Aggregator(job, Event()), time.monotonic() + 2 * job.config.lease_ms / 1000
    while len(aggregator.held.shards) < job.layout.shards and time.monotonic() < deadline:
        aggregator.hold(at_once=True)  # a holder that lost a shard for a moment left its lease to expire
    aggregator.sweep()
    held = list(aggregator.held.shards.values())
    limited = store.client.memory()[1] > 0  # where memory is limited, a holder keeps room for its next version
    for shard in held:
        kinds = {"owner"} | {f"{kind}:{name}" for name in shard.storage.live_names() for kind in ("w", "p", "m")}
        for key in store.client.scan(job.access.keys.slot(shard.number).replace("[", "\\[") + "*"):
            kind, *name = key.split(":")[2:]
            if kind == "reserve" and limited:
                continue
            known = kind in kinds or kind.startswith("opt.") or f"{kind}:{name[0]}" in kinds
            if not known or (name and name[0] not in shard.storage.live_names()):
                problems.append(f"key {key} belongs to no living version")
    names = {name for shard in held for name in shard.storage.live_names()}
    for segment in segments_of(job).names() if segments_of(job) else ():
        if segment.split(":")[1] not in names:
            problems.append(f"segment {segment} belongs to no living version")
    aggregator.release()
    if len(held) < job.layout.shards:
        problems.append("a shard is still held by somebody")
    _remove(store, job)
    if left := list(store.client.scan(f"kvps:{{{job.name}*")):
        problems.append(f"{len(left)} keys are left of a removed job, as {left[0]}")
    if segments_of(job) and segments_of(job).folder.exists():
        problems.append(f"{segments_of(job).folder} is left of a removed job")
    return problems


def _remove(store: Store, job: Job) -> None:
    """Remove a job without the long wait for data under way: no process is left that could send any."""
    settle, kvps.store._SETTLE_S = kvps.store._SETTLE_S, 0.1
    try:
        store.remove_job(job.name)
    finally:
        kvps.store._SETTLE_S = settle
