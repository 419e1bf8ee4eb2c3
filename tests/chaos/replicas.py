"""Masters with two replicas are replaced while they live, and killed, in the middle of rounds. The replica that takes
over is behind, and the old master goes on for a while with the other. With durability replicated nothing that was
acknowledged may be lost or rejected."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial

import redis
from helpers.clusters import Cluster
from helpers.sentinels import NAME, Watched, watched_servers
from helpers.servers import ServerProcess

from chaos.arena import Arena, Servers
from chaos.clusters import behind, cluster, version_of
from chaos.crew import Crew
from chaos.report import Result
from kvps.connection.client import Client
from kvps.store import Store

SETTINGS = {"durability": "replicated:2", "worker_timeout_ms": 60_000, "lease_ms": 1_000, "shards": 2}


@contextmanager
def _watched() -> Iterator[tuple[Watched, Store]]:
    with watched_servers(replicas=2) as watched, Store(Client(watched.url)) as store:
        yield watched, store


def sentinels_and_two_replicas(arena: Arena, failovers: int = 40, mutants: tuple[str, ...] = ()) -> Result:
    """Have Sentinels replace a master, or kill it."""
    result = Result("replicas", "one of two replicas promoted by Sentinels", arena.seed, needed=failovers)

    def fail_over(watched: Watched, crew: Crew, number: int) -> str:
        old = watched.master
        chosen, other = (server for server in watched.servers if server is not old)
        with _passed_over(watched, crew, other):
            if number % 2:
                kind = "planned"
                crew.until(lambda: _begins(watched))
            else:
                kind = "the master killed, the replica behind"
                with behind(arena, crew, old, chosen, others=True):
                    old.kill()
            crew.until(lambda: watched.failed_over(old))
        if old.process.poll() is not None:
            old.start()
        crew.until(watched.is_whole)
        return kind

    return _train(arena, result, failovers, _watched, fail_over, mutants)


def a_cluster_with_two_replicas(arena: Arena, failovers: int = 40, mutants: tuple[str, ...] = ()) -> Result:
    """Have replicas of a cluster take over with their master's consent, without it, and after its death: of the job's
    own slot, and of a shard's."""
    result = Result("replicas-cluster", "one of two replicas promoted in a cluster", arena.seed, needed=failovers)

    def fail_over(nodes: Cluster, crew: Crew, number: int) -> str:
        keys = crew.job.access.keys
        key = keys.slot(arena.random.randrange(2)) if number % 3 == 2 else keys.version
        old = nodes.master_of(key)
        chosen, other = nodes.replicas_of(old)
        other.ask("CONFIG", "SET", "cluster-replica-no-failover", "yes")
        if number % 4 == 1:
            kind = "planned"
            chosen.ask("CLUSTER", "FAILOVER")
        elif number % 4 == 3:
            kind = "planned, the master not asked, the replica behind"
            with behind(arena, crew, old, chosen, others=True):
                pass
            chosen.ask("CLUSTER", "FAILOVER", "TAKEOVER")
        else:
            kind = "the master killed, the replica behind"
            with behind(arena, crew, old, chosen, others=True):
                old.kill()
        crew.until(lambda: _serves(nodes, key, chosen))
        other.ask("CONFIG", "SET", "cluster-replica-no-failover", "no")
        if old.process.poll() is not None:
            old.start()
        crew.until(nodes.is_whole)
        return kind

    return _train(arena, result, failovers, partial(cluster, replicas=6), fail_over, mutants)


def _train(
    arena: Arena,
    result: Result,
    failovers: int,
    serve: Callable[[], AbstractContextManager[tuple[Servers, Store]]],
    fail_over: Callable[[Servers, Crew, int], str],
    mutants: tuple[str, ...],
) -> Result:
    """Train jobs under failovers, of which `fail_over` returns the kind, and judge them: nothing may be rejected."""

    def fault(servers: Servers, crew: Crew, number: int) -> None:
        crew.wait(arena.random.uniform(0.1, 0.4))
        before = crew.job.state().version
        kind = fail_over(servers, crew, number)
        crew.until(lambda: version_of(crew.job) > before + 1)
        result.faults[kind] = result.faults.get(kind, 0) + 1

    def ended(crew: Crew) -> None:
        if rejected := sum(len(commit.plan.rejected) for commit in crew.job.log()):
            result.problems.append(f"{crew.job.name}: {rejected} contributions were rejected")

    arena.under_faults(result, failovers, serve, fault, ended, mutants, **SETTINGS)
    return result.close()


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
