"""Masters of a cluster are killed, and slots are moved, in the middle of rounds: with durability replicated nothing
that was acknowledged may be lost."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import redis
from helpers.clusters import Cluster, ClusterNode, running_cluster
from helpers.servers import ServerProcess

from chaos.arena import Arena
from chaos.crew import Crew
from chaos.report import Result
from chaos.verdict import acknowledged
from kvps.connection.cluster import open_client
from kvps.connection.slots import slot_of
from kvps.errors import KvpsError
from kvps.job import Job
from kvps.store import Store

PATIENT = {"worker_timeout_ms": 60_000, "lease_ms": 1_000}


@contextmanager
def cluster(replicas: int = 3) -> Iterator[tuple[Cluster, Store]]:
    """Start a cluster of three masters, and yield it with a store on it."""
    with running_cluster(replicas=replicas) as found, Store(open_client(found.url)) as store:
        yield found, store


def masters_fail_over(arena: Arena, kills: int = 60, shards: int = 3, durability: str = "replicated") -> Result:
    """Kill the master of the control's slot, or of a shard's, let its replica take its place, and start it again. With
    durability replicated, have a replica take the place of a living master in every third case, as an operator does
    before a server is serviced.

    With durability memory, the replica is behind by then. So a master of the control's slot takes acknowledged
    contributions with it. One of a shard's slot takes bytes; contributions are rejected, with the reason in the log.
    The holder of a shard is killed too, so that versions must be whole without it.
    """
    safe = durability == "replicated"
    name, title = (
        ("failover", "masters of a cluster killed, or replaced by their replicas")
        if safe
        else ("failover-memory", "masters killed ahead of their replicas, durability memory")
    )
    result = Result(name, title, arena.seed, needed=kills)
    gone, rejected = 0, 0

    def kill(nodes: Cluster, crew: Crew, number: int) -> None:
        crew.wait(arena.random.uniform(0.2, 0.8))
        job = crew.job
        kind = ("control", "data")[number % 2]
        key = job.access.keys.version if kind == "control" else job.access.keys.slot(arena.random.randrange(shards))
        before = job.state().version
        victim = nodes.master_of(key)
        if planned := safe and number % 3 == 2:
            nodes.replica_of(victim).ask("CLUSTER", "FAILOVER")
        elif safe:
            victim.kill()
        else:
            with behind(arena, crew, victim, nodes.replica_of(victim)):
                victim.kill()
            for child in crew.children.values():
                child.spec["url"] = nodes.url  # a process that starts knows this one node
            crew.kill(crew.children[f"a{arena.random.randrange(shards)}"])  # whose memory had it all
        began = time.monotonic()
        crew.until(lambda: _taken_over(nodes, key, victim))
        if not planned:
            victim.start()  # as its service manager does; without a replica nothing more is acknowledged
        crew.until(lambda: version_of(job) > before + 1)
        what = f"{kind} {'replaced' if planned else 'killed'}"
        result.faults[what] = result.faults.get(what, 0) + 1
        if not planned:
            result.times.setdefault(f"until the next commit, {what}", []).append(time.monotonic() - began)
        crew.until(nodes.is_whole)

    def ended(crew: Crew) -> None:
        nonlocal gone, rejected
        logged = [commit.plan for commit in crew.job.log()]
        rejected += sum(len(plan.rejected) for plan in logged)
        if not safe:
            kept = {(c.worker, c.incarnation, c.seq) for plan in logged for c in plan.contributions + plan.rejected}
            crew.forgiven |= acknowledged(crew.acks) - kept
            gone += len(crew.forgiven)

    arena.under_faults(result, kills, cluster, kill, ended, shards=shards, durability=durability, **PATIENT)
    result.figures["contributions rejected because a server had lost their bytes, each in the log"] = rejected
    if not safe:
        result.figures["acknowledged contributions that a server took with it"] = gone
    return result.close()


def slots_move(arena: Arena, moves: int = 42, shards: int = 3) -> Result:
    """Move the control's slot, or a shard's, to another master, key by key, while the job trains."""
    result = Result("slots", "slots of a cluster moved", arena.seed, needed=moves)

    def move(nodes: Cluster, crew: Crew, number: int) -> None:
        crew.wait(arena.random.uniform(0.1, 0.4))
        keys, before = crew.job.access.keys, crew.job.state().version
        _move(nodes, keys.slot(arena.random.randrange(shards)) if number % 3 else keys.version, arena)
        crew.until(lambda: version_of(crew.job) > before + 1)
        result.faults["moved"] = result.faults.get("moved", 0) + 1

    arena.under_faults(result, moves, cluster, move, shards=shards, durability="replicated", **PATIENT)
    return result.close()


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


@contextmanager
def behind(
    arena: Arena, crew: Crew, master: ServerProcess, replica: ServerProcess, others: bool = False
) -> Iterator[None]:
    """Let the master be written to for a while without a replica, but with `others` if it has more. The replica goes on
    behind the block."""
    replica.signal(signal.SIGSTOP)
    try:
        master.ask("CLIENT", "KILL", "TYPE", "REPLICA")  # what is on its way would be read after SIGCONT
        crew.until(lambda: not others or bool(master.replicas_in_step()))
        crew.wait(arena.random.uniform(0.1, 0.6))
        yield
    finally:
        replica.signal(signal.SIGCONT)


def version_of(job: Job) -> int:
    with suppress(KvpsError):
        return job.state().version
    return -1
