"""Masters that Sentinels watch are killed, and replicas take their places. With durability replicated nothing that was
acknowledged may be lost; with memory, what the replica never got must be reported and done again."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from helpers.sentinels import Watched, watched_servers
from helpers.servers import free_port

from chaos.arena import Arena
from chaos.crew import Crew
from chaos.report import Result
from chaos.servers import Losses, state_in
from kvps.connection.client import Client
from kvps.errors import KvpsError
from kvps.job import Job
from kvps.store import Store

PATIENT = {"worker_timeout_ms": 60_000, "lease_ms": 1_000}
_IN_FILES = ("--appendonly", "yes", "--appendfsync", "always", "--auto-aof-rewrite-percentage", "0")


@contextmanager
def _watched() -> Iterator[tuple[Watched, Store]]:
    with watched_servers(*_IN_FILES) as watched, Store(Client(watched.url)) as store:
        yield watched, store


def sentinels_fail_over(arena: Arena, kills: int = 40) -> Result:
    """Kill the master, let the Sentinels promote its replica, and start it again: half of the kills with durability
    replicated, half with memory while the replica lags."""
    result = Result("sentinel", "masters that Sentinels watch killed", arena.seed, needed=kills)
    every: dict[str, Losses] = {}  # of each job
    for durability, share in (("replicated", kills - kills // 2), ("memory", kills // 2)):

        def fault(watched: Watched, crew: Crew, number: int, durability: str = durability) -> None:
            losses = every.setdefault(crew.job.name, Losses(crew.job, crew.forgiven))
            crew.wait(arena.random.uniform(0.2, 0.8))
            took = _fail_over(arena, watched, crew, losses, lags=durability == "memory")
            result.times.setdefault(f"until the next commit, {durability}", []).append(took)
            result.faults[durability] = result.faults.get(durability, 0) + 1

        def ended(crew: Crew, durability: str = durability) -> None:
            losses = every[crew.job.name]
            result.problems.extend(losses.unsaid(arena.processes.log))
            if durability == "replicated" and losses.lost:
                result.problems.append(f"{crew.job.name}: {len(losses.lost)} contributions were not on the replica")

        arena.under_faults(result, share, _watched, fault, ended, shards=2, durability=durability, **PATIENT)
    lost = sum(losses.versions for losses in every.values())
    result.figures["versions that the replicas never got, all reported"] = lost
    return result.close()


def _fail_over(arena: Arena, watched: Watched, crew: Crew, losses: Losses, lags: bool) -> float:
    """Kill the master, and start it again once its replica has taken its place. Return the seconds until a commit."""
    job, victim = crew.job, watched.master
    replica = next(server for server in watched.servers if server is not victim)
    if lags:
        replica.ask("REPLICAOF", "127.0.0.1", free_port())  # nobody is there; the Sentinels correct that after 1.2 s
        crew.wait(arena.random.uniform(0.1, 0.5))
    victim.kill()
    began = time.monotonic()
    with Store(Client(f"redis://127.0.0.1:{replica.port}")) as there:
        after = there.job(job.name).state()
    assert replica.ask("ROLE")[0] == "slave", "the replica was promoted before its state was read"
    losses.note(crew, state_in(victim.folder, job.name), after)
    crew.until(lambda: watched.failed_over(victim))
    victim.start()  # as its service manager does; with durability replicated nothing is acknowledged before
    crew.until(lambda: _goes_on(job, after.history, after.version))
    took = time.monotonic() - began
    crew.until(watched.is_whole)
    return took


def _goes_on(job: Job, history: str, version: int) -> bool:
    """Return whether a version was committed in another history."""
    with suppress(KvpsError):
        state = job.state()
        return state.history != history and state.version > version + 1
    return False
