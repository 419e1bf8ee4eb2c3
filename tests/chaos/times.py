"""How long a job stands still after a fault: from the SIGKILL to the first commit that cannot be from before it.

The driver measures by its monotonic clock, and looks at the commit log every 10 ms. The content of
the log's entry decides which commit is the first, not its time:

    a worker killed      the first commit without a contribution of the dead incarnation: in BSP there is none before
                         the job knows that the worker is gone
    a holder killed      the first commit for which the shard was staged under another term
    Redis killed         the first commit that was planned in another history, which only a restart of the server begins
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import NamedTuple

from helpers.faults import MortalServer
from helpers.harness import log_entries
from helpers.servers import private_directory
from helpers.waiting import eventually

from chaos.arena import Arena
from chaos.crew import Child, Crew, Stuck
from chaos.report import Result
from chaos.servers import rewriting
from kvps.connection.client import Client
from kvps.job import Job
from kvps.protocol.plan import Plan
from kvps.store import Store

LEASE_MS, WORKER_TIMEOUT_MS = 1000, 2000
SLACK_S = 2.0
COMPUTES_S = 0.005  # a worker's time for a gradient; without it the log would only get longer
_NOTE = """\
Times are by the harness's monotonic clock, from the SIGKILL to the first commit that cannot be from before it: one
without the dead worker's incarnation, under another term than the dead holder's, or in the history after Redis's
restart. It is looked for every 10 ms. The lease is {lease_s:g} s and the worker timeout {silence_s:g} s (kvps's own
defaults are 3 s and 10 s). Supervised: the death is reported at once, as `kvps up` does for its children. Otherwise the
dead process is replaced only when the job has continued without it. Holders have a standby. p50 and p99 are
measured values; of fewer than 100 values, p99 is the largest."""


def faults_are_timed(
    arena: Arena,
    known: int = 100,
    unknown: int = 40,
    lease_ms: int = LEASE_MS,
    worker_timeout_ms: int = WORKER_TIMEOUT_MS,
    slack_s: float = SLACK_S,
) -> Result:
    """Time deaths: `known` a kind reported at once (as by `kvps up`), `unknown` found by timeouts, as many of Redis.
    A fault may take its timeout plus `slack_s` seconds."""
    result = Result("times", "killed, and timed until the next commit", arena.seed, needed=2 * known + 3 * unknown)
    timeouts = {"lease_ms": lease_ms, "worker_timeout_ms": worker_timeout_ms}
    lease_s, silence_s = lease_ms / 1000, worker_timeout_ms / 1000
    cases: list[tuple[str, Callable[[Arena, Crew], float], int, bool, float]] = [
        ("a worker in BSP, supervised", _worker, known, True, silence_s),
        ("a worker in BSP, found by its silence", _worker, unknown, False, silence_s),
        ("the holder of a shard, supervised", _holder, known, True, lease_s),
        ("the holder of a shard, found by its lease", _holder, unknown, False, lease_s),
    ]
    with arena.server() as store:
        job = arena.job(store, **timeouts)
        with arena.crew(job, result) as crew:
            crew.start_all(3, 2, per_shard=2, computes_s=COMPUTES_S)
            for what, fault, times, crew.at_once, timeout_s in cases:
                for _ in range(times):
                    crew.until(lambda: _all_are_there(crew))
                    crew.wait(arena.random.uniform(0.05, 0.25))
                    _note(result, what, fault(arena, crew), timeout_s + slack_s)
                arena.say(f"{what}: longest {max(result.times[what]):.2f} s of {times}")
    _servers(arena, result, unknown, timeouts, slack_s)
    result.note = _NOTE.format(lease_s=lease_s, silence_s=silence_s)
    return result.close()


def _note(result: Result, what: str, seconds: float, most_s: float) -> None:
    result.faults[what] = result.faults.get(what, 0) + 1
    result.times.setdefault(what, []).append(round(seconds, 4))
    result.bars[what] = most_s
    if seconds > most_s:
        result.problems.append(f"{what}: {seconds:.2f} s to the next commit, not {most_s:g} s")


def _all_are_there(crew: Crew) -> bool:
    """Return whether the newest commit holds every worker's present incarnation, and each shard has a living holder."""
    log = crew.job.access.client.call("XREVRANGE", crew.job.access.keys.commits, "+", "-", "COUNT", 20)
    newest = next((_commit(fields) for _, fields in log if fields["kind"] == "commit"), None)
    members, marks = crew.job.state().members, {child.mark for child in crew.running}
    lives = [members.get(child.name) for child in _workers(crew)]
    present = newest and all(m and m.active and newest.authors.get(m.worker) == m.incarnation for m in lives)
    forked = {m.pid for m in lives if m} == {child.pid for child in _workers(crew)}
    holders = crew.job.access.reader.holders()
    return bool(present) and forked and all(holder.rpartition(":")[0] in marks for holder in holders)


def _workers(crew: Crew) -> list[Child]:
    return [child for child in crew.running if child.spec["role"] == "worker"]


def _worker(arena: Arena, crew: Crew) -> float:
    victim = arena.random.choice(_workers(crew))
    dead = crew.job.state().members[victim.name].incarnation
    return _killed(crew, victim, lambda commit: commit.authors.get(victim.name) != dead)


def _holder(arena: Arena, crew: Crew) -> float:
    shard = arena.random.randrange(crew.job.layout.shards)
    mark, term = crew.job.access.reader.holders()[shard].rpartition(":")[0], crew.job.access.reader.terms()[shard]
    victim = next(child for child in crew.running if child.mark == mark)
    return _killed(crew, victim, lambda commit: commit.terms[shard] != term)


def _killed(crew: Crew, victim: Child, without: Callable[[Commit], bool]) -> float:
    """Kill a child; return the seconds to the first commit `without` it. If not reported, it is replaced after that."""
    after, began = crew.job.state().last_entry, time.monotonic()
    assert crew.kill(victim)
    if crew.at_once:
        crew.until(lambda: _committed(crew.job, after, without))
    elif not eventually(lambda: _committed(crew.job, after, without)):
        raise Stuck("no commit after a fault")
    return time.monotonic() - began


def _servers(arena: Arena, result: Result, kills: int, timeouts: dict[str, int], slack_s: float) -> None:
    """Kill Redis, leave it dead for up to a second, and start it again on its file."""
    down = []
    with ExitStack() as stack:
        server = stack.enter_context(MortalServer(stack.enter_context(private_directory())))
        store = stack.enter_context(Store(Client(server.url)))
        job = arena.job(store, **timeouts)
        with arena.crew(job, result) as crew:
            crew.start_all(3, 2, computes_s=COMPUTES_S)
            for _ in range(kills):
                crew.until(lambda: _all_are_there(crew))
                crew.wait(arena.random.uniform(0.05, 0.25))
                state, began = job.state(), time.monotonic()
                server.kill()
                time.sleep(arena.random.uniform(0, 1))
                server.start()
                up = time.monotonic()
                crew.until(lambda s=state: _committed(job, s.last_entry, lambda commit: commit.history != s.history))
                at = time.monotonic()
                down.append(up - began)
                most_s = timeouts["lease_ms"] / 1000 + slack_s
                _note(result, "Redis, from when it answers again", max(0.0, at - up), most_s)
                result.times.setdefault("Redis, from its SIGKILL", []).append(round(at - began, 4))
                crew.until(lambda: not rewriting(store))
    result.figures["Redis was down for, s"] = f"{min(down):.2f} to {max(down):.2f}"
    arena.say(f"Redis: {kills} kills, down for {result.figures['Redis was down for, s']} s")


class Commit(NamedTuple):
    """A commit of the log: in which history, worker -> incarnation of its contributions, the term of each shard."""

    history: str
    authors: dict[str, str]
    terms: list[str]


def _commit(fields: dict[str, str]) -> Commit:
    plan = Plan.from_json(fields["plan"])
    authors = {c.worker: c.incarnation for c in plan.contributions}
    return Commit(plan.history, authors, [said.split()[0] for said in fields["shards"].split(",")])


def _committed(job: Job, after: str, holds: Callable[[Commit], bool]) -> bool:
    """Return whether the log has such a commit behind an entry."""
    return any(holds(_commit(fields)) for _, fields in log_entries(job, after) if fields["kind"] == "commit")
