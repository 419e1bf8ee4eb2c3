"""Masters that Sentinels watch are killed, and replicas take their places. With durability replicated nothing that was
acknowledged may be lost; with memory, what the replica never got must be reported and done again."""

from __future__ import annotations

import time
from contextlib import suppress

from helpers.sentinels import Watched, watched_servers
from helpers.servers import free_port

from chaos.arena import Arena, shared_out
from chaos.crew import Crew
from chaos.report import Result
from chaos.servers import Losses, state_in
from kvps.connection.client import Client
from kvps.errors import KvpsError
from kvps.job import Job
from kvps.store import Store

PATIENT = {"worker_timeout_ms": 60_000, "lease_ms": 1_000}
_IN_FILES = ("--appendonly", "yes", "--appendfsync", "always", "--auto-aof-rewrite-percentage", "0")


def sentinels_fail_over(arena: Arena, kills: int = 40) -> Result:
    """Kill the master, let the Sentinels promote its replica, and start it again: half of the kills with durability
    replicated, half with memory while the replica lags."""
    result = Result("sentinel", "masters that Sentinels watch killed", arena.seed, needed=kills)
    times: dict[str, list[float]] = {"replicated": [], "memory": []}
    rolled_back = 0
    for number, (durability, found) in enumerate(times.items()):
        half = kills // 2 + (kills % 2 if durability == "replicated" else 0)
        for mode, staleness, share in shared_out(half, arena.seed + number):
            with watched_servers(*_IN_FILES) as watched, Store(Client(watched.url)) as store:
                job = arena.job(store, staleness=staleness, durability=durability, **PATIENT)
                losses = Losses(job)
                with arena.crew(job) as crew:
                    crew.start_all(3, 2, log=True)
                    crew.until(lambda j=job: j.state().version > 3)
                    for _ in range(share):
                        crew.wait(arena.random.uniform(0.2, 0.8))
                        found.append(_fail_over(arena, watched, crew, losses, lags=durability == "memory"))
                    crew.finish()
                    result.problems += losses.unsaid(arena.processes.log)
                    if durability == "replicated" and losses.lost:
                        result.problems.append(f"{job.name}: {len(losses.lost)} contributions were not on the replica")
                    result.verdict.add(arena.judge(store, crew, frozenset(losses.lost)))
            rolled_back += losses.versions
            result.faults[f"{durability}, {mode}"] = share
            arena.say(f"{durability}, {mode}: {share} kills, {losses.versions} versions rolled back")
    result.figures["versions that the replicas never got, all reported"] = rolled_back
    result.times = {f"until the next commit, {name}": found for name, found in times.items() if found}
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
    crew.until(lambda: watched.failed_over(victim), limit_s=90)
    victim.start()  # as its service manager does; with durability replicated nothing is acknowledged before
    crew.until(lambda: _goes_on(job, after.history, after.version), limit_s=90)
    took = time.monotonic() - began
    crew.until(watched.is_whole, limit_s=90)
    return took


def _goes_on(job: Job, history: str, version: int) -> bool:
    """Return whether a version was committed in another history."""
    with suppress(KvpsError):
        state = job.state()
        return state.history != history and state.version > version + 1
    return False
