"""Masters with two replicas are replaced while they live, and killed, in the middle of rounds. The replica that takes
over is behind, and the old master goes on for a while with the other. With durability replicated nothing that was
acknowledged may be lost or rejected."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import redis
from helpers.clusters import Cluster, running_cluster
from helpers.sentinels import NAME, Watched, watched_servers
from helpers.servers import ServerProcess

from chaos.arena import Arena, shared_out
from chaos.crew import Crew
from chaos.report import Result
from chaos.verdict import acknowledged
from kvps.connection.client import Client
from kvps.connection.cluster import open_client
from kvps.errors import KvpsError
from kvps.store import Store

SETTINGS = {"durability": "replicated:2", "worker_timeout_ms": 60_000, "lease_ms": 1_000}
FailOver = Callable[[Crew, int], str]
"""Causes the failover of this number, and waits until all servers are in step again. Returns its kind."""


def sentinels_and_two_replicas(arena: Arena, failovers: int = 40, mutants: tuple[str, ...] = ()) -> Result:
    """Have Sentinels replace a master, or kill it."""
    result = Result("replicas", "one of two replicas promoted by Sentinels", arena.seed, needed=failovers)
    numbers = itertools.count()
    for mode, staleness, share in shared_out(failovers, arena.seed):
        with watched_servers(replicas=2) as watched, Store(Client(watched.url)) as store:

            def fail_over(crew: Crew, number: int, watched: Watched = watched) -> str:
                old = watched.master
                chosen, other = (server for server in watched.servers if server is not old)
                with _passed_over(watched, crew, other):
                    if number % 2:
                        kind = "planned"
                        crew.until(lambda: _begins(watched))
                    else:
                        kind = "the master killed, the replica behind"
                        with _behind(arena, crew, old, chosen):
                            old.kill()
                    crew.until(lambda: watched.failed_over(old))
                if old.process.poll() is not None:
                    old.start()
                crew.until(watched.is_whole)
                return kind

            _train(arena, result, store, (mode, staleness), itertools.islice(numbers, share), fail_over, mutants)
    return result.close()


def a_cluster_with_two_replicas(arena: Arena, failovers: int = 40, mutants: tuple[str, ...] = ()) -> Result:
    """Have replicas of a cluster take over with their master's consent, without it, and after its death: of the job's
    own slot, and of a shard's."""
    result = Result("replicas-cluster", "one of two replicas promoted in a cluster", arena.seed, needed=failovers)
    numbers = itertools.count()
    for mode, staleness, share in shared_out(failovers, arena.seed):
        with running_cluster(replicas=6) as cluster, Store(open_client(cluster.url)) as store:

            def fail_over(crew: Crew, number: int, cluster: Cluster = cluster) -> str:
                keys = crew.job.access.keys
                key = keys.slot(arena.random.randrange(2)) if number % 3 == 2 else keys.version
                old = cluster.master_of(key)
                chosen, other = cluster.replicas_of(old)
                other.ask("CONFIG", "SET", "cluster-replica-no-failover", "yes")
                if number % 4 == 1:
                    kind = "planned"
                    chosen.ask("CLUSTER", "FAILOVER")
                elif number % 4 == 3:
                    kind = "planned, the master not asked, the replica behind"
                    with _behind(arena, crew, old, chosen):
                        pass
                    chosen.ask("CLUSTER", "FAILOVER", "TAKEOVER")
                else:
                    kind = "the master killed, the replica behind"
                    with _behind(arena, crew, old, chosen):
                        old.kill()
                crew.until(lambda: _serves(cluster, key, chosen))
                other.ask("CONFIG", "SET", "cluster-replica-no-failover", "no")
                if old.process.poll() is not None:
                    old.start()
                crew.until(cluster.is_whole)
                return kind

            _train(arena, result, store, (mode, staleness), itertools.islice(numbers, share), fail_over, mutants)
    return result.close()


def _train(
    arena: Arena,
    result: Result,
    store: Store,
    mode: tuple[str, int],
    numbers: Iterator[int],
    fail_over: FailOver,
    mutants: tuple[str, ...],
) -> None:
    """Train a job under failovers to its end, and judge it."""
    name, staleness = mode
    job = arena.job(store, staleness=staleness, **SETTINGS)
    with arena.crew(job, mutants=mutants) as crew:
        crew.start_all(3, 2, log=True)
        crew.until(lambda: job.state().version > 3)
        for number in numbers:
            crew.wait(arena.random.uniform(0.1, 0.4))
            before = job.state().version
            kind = fail_over(crew, number)
            crew.until(lambda before=before: _version(crew) > before + 1)
            result.faults[kind] = result.faults.get(kind, 0) + 1
        crew.finish()
        acks = len(acknowledged(crew.acks))
        if rejected := sum(len(commit.plan.rejected) for commit in job.log()):
            result.problems.append(f"{job.name}: {rejected} contributions were rejected")
        verdict = arena.judge(store, crew)
        result.verdict.add(verdict)
    arena.say(f"{name}: {result.injected} failovers so far, {verdict.lost} of {acks} acknowledgements lost")


@contextmanager
def _behind(arena: Arena, crew: Crew, master: ServerProcess, replica: ServerProcess) -> Iterator[None]:
    """Let the master be written to for a while without a replica. The replica goes on behind the block."""
    replica.signal(signal.SIGSTOP)
    try:
        master.ask("CLIENT", "KILL", "TYPE", "REPLICA")  # what is on its way would be read after SIGCONT
        crew.until(lambda: _online(master))
        crew.wait(arena.random.uniform(0.2, 0.4))
        yield
    finally:
        replica.signal(signal.SIGCONT)


def _online(master: ServerProcess) -> bool:
    info = master.ask("INFO", "replication")
    return any(isinstance(value, dict) and value.get("state") == "online" for value in info.values())


@contextmanager
def _passed_over(watched: Watched, crew: Crew, replica: ServerProcess) -> Iterator[None]:
    """Have the Sentinels promote another replica, also if this one has more."""
    replica.ask("CONFIG", "SET", "replica-priority", 0)
    crew.until(lambda: watched.priorities(replica) == {0})
    yield
    replica.ask("CONFIG", "SET", "replica-priority", 100)


def _begins(watched: Watched) -> bool:
    """Ask a Sentinel to replace the master. Return whether it does."""
    with suppress(redis.RedisError):
        return bool(watched.sentinels[0].ask("SENTINEL FAILOVER", NAME))
    return False


def _serves(cluster: Cluster, key: str, node: ServerProcess) -> bool:
    with suppress(redis.RedisError, StopIteration, IndexError):
        return cluster.master_of(key) is node
    return False


def _version(crew: Crew) -> int:
    with suppress(KvpsError):
        return crew.job.state().version
    return -1
