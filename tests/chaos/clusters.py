"""Masters of a cluster are killed, and slots are moved, in the middle of rounds: with durability replicated nothing
that was acknowledged may be lost."""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import redis
from helpers.clusters import Cluster, ClusterNode, running_cluster

from chaos.arena import Arena, shared_out
from chaos.crew import Crew
from chaos.report import Result
from chaos.verdict import Ack, acknowledged
from kvps.connection.cluster import open_client
from kvps.connection.slots import slot_of
from kvps.errors import KvpsError
from kvps.job import Job
from kvps.store import Store

PATIENT = {"worker_timeout_ms": 60_000, "lease_ms": 1_000}


class Training(NamedTuple):
    """A job that trains on a cluster, under its crew."""

    cluster: Cluster
    job: Job
    crew: Crew

    def goes_on(self, version: int) -> None:
        """Wait for the second version after this one: its step began after the fault."""
        self.crew.until(lambda: _version(self.job) > version + 1, limit_s=90)

    def is_whole(self) -> None:
        """Wait until every master of the cluster has a replica in step."""
        self.crew.until(self.cluster.is_whole, limit_s=90)

    def hands_over(self, key: str, master: ClusterNode) -> None:
        """Wait until another master has the key."""
        self.crew.until(lambda: _taken_over(self.cluster, key, master), limit_s=90)


def _train(
    arena: Arena,
    result: Result,
    faults: int,
    shards: int,
    fault: Callable[[Training, int], None],
    lost: Callable[[Training], frozenset[Ack]] = lambda ended: frozenset(),
    **settings: Any,
) -> None:
    """In each mode train a job on a cluster of its own, under its share of the faults, to its end, and judge it.

    fault  causes the fault of this number, over all modes, and waits until the job goes on
    lost   returns the acknowledged contributions that an ended job may have lost
    """
    numbers = itertools.count()
    for mode, staleness, share in shared_out(faults, arena.seed):
        with running_cluster() as cluster, Store(open_client(cluster.url)) as store:
            job = arena.job(store, staleness=staleness, shards=shards, **PATIENT | settings)
            with arena.crew(job) as crew:
                training = Training(cluster, job, crew)
                crew.start_all(3, shards, log=True)
                crew.until(lambda j=job: j.state().version > 3)
                for number in itertools.islice(numbers, share):
                    fault(training, number)
                crew.finish()
                result.verdict.add(arena.judge(store, crew, lost(training)))
        result.faults[mode] = share
        arena.say(f"{mode}: {share} {result.title}")


def masters_fail_over(arena: Arena, kills: int = 42, shards: int = 3, durability: str = "replicated") -> Result:
    """Kill the master of the control's slot, or of a shard's, let its replica take its place, and start it again.

    With durability memory, the replica is behind by then. So a master of the control's slot takes acknowledged
    contributions with it. One of a shard's slot takes bytes; contributions are rejected, with the reason in the log.
    The holder of a shard is killed too, so that versions must be whole without it.
    """
    safe = durability == "replicated"
    name, title = (
        ("failover", "masters of a cluster killed")
        if safe
        else ("failover-memory", "masters killed ahead of their replicas, durability memory")
    )
    result = Result(name, title, arena.seed, needed=kills)
    gone, rejected = 0, 0
    times: dict[str, list[float]] = {"control": [], "data": []}

    def kill(training: Training, number: int) -> None:
        cluster, job, crew = training
        crew.wait(arena.random.uniform(0.2, 0.8))
        kind = ("control", "data")[number % 2]
        key = job.access.keys.version if kind == "control" else job.access.keys.slot(arena.random.randrange(shards))
        before = job.state().version
        victim = cluster.master_of(key)
        if safe:
            victim.kill()
        else:
            _kill_ahead_of_its_replica(cluster, victim, crew, arena.random.uniform(0.1, 0.6))
            for child in crew.children.values():
                child.spec["url"] = cluster.url  # a process that starts knows this one node
            crew.kill(crew.children[f"a{arena.random.randrange(shards)}"])  # whose memory had it all
        began = time.monotonic()
        training.hands_over(key, victim)
        victim.start()  # as its service manager does; without a replica nothing more is acknowledged
        training.goes_on(before)
        times[kind].append(time.monotonic() - began)
        training.is_whole()

    def lost(ended: Training) -> frozenset[Ack]:
        nonlocal gone, rejected
        found = frozenset() if safe else _lost(ended.job, ended.crew)
        gone, rejected = gone + len(found), rejected + _rejections(ended.job)
        return found

    _train(arena, result, kills, shards, kill, lost, durability=durability)
    result.figures["contributions rejected because a server had lost their bytes, each in the log"] = rejected
    if not safe:
        result.figures["acknowledged contributions that a server took with it"] = gone
    result.times = {f"until the next commit, {kind} killed": found for kind, found in times.items() if found}
    return result.close()


def slots_move(arena: Arena, moves: int = 42, shards: int = 3) -> Result:
    """Move the control's slot, or a shard's, to another master, key by key, while the job trains."""
    result = Result("slots", "slots of a cluster moved", arena.seed, needed=moves)

    def move(training: Training, number: int) -> None:
        key, before = _one_of_three(arena, training, number, shards)
        _move(training.cluster, key, arena)
        training.goes_on(before)

    _train(arena, result, moves, shards, move, durability="replicated")
    return result.close()


def roles_change(arena: Arena, changes: int = 21, shards: int = 3) -> Result:
    """Have a replica take the place of its living master, as an operator does before a server is serviced."""
    result = Result("roles", "masters of a cluster replaced by their replicas", arena.seed, needed=changes)

    def replace(training: Training, number: int) -> None:
        key, before = _one_of_three(arena, training, number, shards)
        master = training.cluster.master_of(key)
        training.cluster.replica_of(master).ask("CLUSTER", "FAILOVER")
        training.hands_over(key, master)
        training.goes_on(before)
        training.is_whole()

    _train(arena, result, changes, shards, replace, durability="replicated")
    return result.close()


def _one_of_three(arena: Arena, training: Training, number: int, shards: int) -> tuple[str, int]:
    """Wait a moment. Return a key of the control's slot, for one fault of three, or of a shard's; and the version."""
    training.crew.wait(arena.random.uniform(0.1, 0.4))
    keys = training.job.access.keys
    key = keys.version if number % 3 == 0 else keys.slot(arena.random.randrange(shards))
    return key, training.job.state().version


def _move(cluster: Cluster, key: str, arena: Arena) -> None:
    source = cluster.master_of(key)
    target = arena.random.choice([node for node in cluster.masters if node is not source])
    for _ in range(50):
        with suppress(redis.RedisError):  # a node may still be learning of the last move
            cluster.migrate(slot_of(key), target)
            return
        time.sleep(0.1)
    raise RuntimeError(f"slot {slot_of(key)} does not move")


def _taken_over(cluster: Cluster, key: str, victim: ClusterNode) -> bool:
    with suppress(redis.RedisError, StopIteration, IndexError):
        return cluster.master_of(key) is not victim
    return False


def _kill_ahead_of_its_replica(cluster: Cluster, victim: ClusterNode, crew: Crew, ahead_s: float) -> None:
    """Kill a master that has been written to for `ahead_s` since its replica got anything."""
    replica = cluster.replica_of(victim)
    replica.signal(signal.SIGSTOP)
    victim.ask("CLIENT", "KILL", "TYPE", "REPLICA")  # what is on its way would be read after SIGCONT
    crew.wait(ahead_s)
    victim.kill()
    replica.signal(signal.SIGCONT)


def _lost(job: Job, crew: Crew) -> frozenset[Ack]:
    """Return the acknowledged contributions that are in no commit and were not rejected."""
    logged = {(c.worker, c.incarnation, c.seq) for x in job.log() for c in x.plan.contributions + x.plan.rejected}
    return frozenset(acknowledged(crew.acks) - logged)


def _rejections(job: Job) -> int:
    return sum(len(commit.plan.rejected) for commit in job.log())


def _version(job: Job) -> int:
    with suppress(KvpsError):
        return job.state().version
    return -1
