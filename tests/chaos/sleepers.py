"""The holder of a lease or an id sleeps until another process has it, and wakes: nothing it then sends may count."""

from __future__ import annotations

import itertools
import json
import signal
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from chaos import points
from chaos.arena import MODES, Arena, share_of, shared_out
from chaos.crew import Child, Crew
from chaos.report import Result
from kvps.arrays.layout import DTYPE
from kvps.connection.sockets import ChunkGone
from kvps.job import Job

LEASE_MS = 200
_POINTS = (*points.AGGREGATOR, "")
_WORKERS_POINTS = ("before push", "push sent, no reply yet", "push answered", "after waking")
_PIN_MS = 10_000


def holders_sleep(
    arena: Arena,
    sleeps: int = 50,
    duels: int = 12,
    mutants: tuple[str, ...] = (),
    at: Sequence[str] = _POINTS,
    **settings: Any,
) -> Result:
    """Put the holder of a shard to sleep for 3 lease times, mostly at a point; then two holders, one after another."""
    result = Result("sleepers", "the holder of a lease asleep for 3 lease times", arena.seed, needed=sleeps + duels)
    compared: list[int] = []
    places = itertools.cycle(at)
    with arena.server() as store:
        for number, (mode, staleness) in enumerate(MODES.items()):
            naps, fights = share_of(number, sleeps), share_of(number, duels)
            if not naps + fights:
                continue
            job = arena.job(store, staleness=staleness, lease_ms=LEASE_MS, worker_timeout_ms=60_000, **settings)
            with arena.crew(job, result, mutants=mutants) as crew:
                crew.start_all(3, job.layout.shards, per_shard=2)
                for point in itertools.islice(places, naps):
                    result.problems += _nap(arena, crew, point, compared)
                result.faults[f"{mode}, asleep"] = naps
                woken = sum(_duel(crew) for _ in range(fights))
                result.faults[f"{mode}, asleep with its plan still open"] = woken
            arena.say(f"{mode}: {naps} sleeps, {woken} with the plan still open")
    result.figures["versions whose bytes were compared before and after a sleeper woke"] = len(compared)
    return result.close()


def _holder(crew: Crew, shard: int) -> Child:
    """Return the child that holds the shard; wait until there is one."""
    while True:
        mark = crew.job.access.reader.holders()[shard].rpartition(":")[0]
        for child in crew.running:
            if child.mark == mark:
                return child
        crew.step(0.01)


def _nap(arena: Arena, crew: Crew, point: str, compared: list[int]) -> list[str]:
    """Put a holder to sleep, let another take over, wake it: no byte of a committed version may change."""
    shard = arena.random.randrange(crew.job.layout.shards)
    sleeper = _holder(crew, shard)
    if point:
        sleeper = _replaced(crew, shard, point, arena.random.randint(1, points.passages(point, 30)))
    else:
        crew.kill(sleeper, signal.SIGSTOP)
    crew.wait(3 * LEASE_MS / 1000)
    pinned = json.loads(crew.job.access.scripts.pin(_PIN_MS))
    names = [pinned["names"][str(shard)] for shard in range(crew.job.layout.shards)]
    before = stored(crew.job, names)
    crew.kill(sleeper, signal.SIGCONT)
    version = crew.job.state().version
    crew.until(lambda: crew.job.state().version > version + 3 or not crew.running)
    after = stored(crew.job, names)
    if not before or not after:
        return []
    compared.append(pinned["version"])
    return [] if before == after else [f"version {pinned['version']}: its bytes changed after the sleeper woke"]


def _replaced(crew: Crew, shard: int, point: str, nth: int) -> Child:
    """Have the next holder of a shard fall asleep at `point`; return it when it sleeps."""
    first, second = (crew.children[name] for name in (f"a{shard}", f"a{shard}b"))
    crew.kill(second, signal.SIGSTOP)  # on a busy machine it could take the shard before the first child sleeps
    _again(crew, first, point, nth)
    crew.until(lambda: _noted(crew) == 1)
    crew.kill(second, signal.SIGCONT)
    crew.count()
    return first


def _again(crew: Crew, child: Child, point: str, nth: int) -> None:
    """Kill a child; the child started in its place falls asleep at `point`."""
    lives, child.spec["arm"] = child.lives, {"point": point, "nth": nth, "signal": signal.SIGSTOP}
    crew.kill(child)
    crew.until(lambda: child.lives > lives)
    del child.spec["arm"]


def _duel(crew: Crew) -> int:
    """Put the holder to sleep before ready.lua, and its successor once it has the lease; wake the holder first."""
    first, second = (crew.children[name] for name in ("a0", "a0b"))
    crew.kill(second, signal.SIGSTOP)
    _again(crew, first, "before commit", 1)
    crew.until(lambda: _noted(crew) == 1)
    _again(crew, second, "after the lease", 1)
    crew.until(lambda: _noted(crew) == 2)
    version = crew.job.state().version
    crew.kill(first, signal.SIGCONT)
    crew.wait(LEASE_MS / 1000 / 2)
    crew.kill(second, signal.SIGCONT)
    crew.until(lambda: crew.job.state().version > version + 3)
    crew.count()
    return 1


def _noted(crew: Crew) -> int:
    return len(crew.notes.read_text().splitlines()) if crew.notes.exists() else 0


def stored(job: Job, names: Sequence[str]) -> bytes:
    """Return the bytes of the weights with these names; empty if the version is deleted."""
    flat = np.empty(job.layout.size, DTYPE)
    with suppress(ChunkGone):  # the version is older than two versions by now, and its pin has expired
        job.access.reader._read(names, flat)
        return flat.tobytes()
    return b""


def workers_sleep(arena: Arena, sleeps: int = 24, mutants: tuple[str, ...] = ()) -> Result:
    """Put a worker to sleep around its push while another takes its id; wake it: what it sends is refused."""
    result = Result("impostors", "a worker asleep while another took its id", arena.seed, needed=sleeps)
    at, numbers = itertools.cycle(_WORKERS_POINTS), itertools.count()
    with arena.server() as store:
        for mode, staleness, naps in shared_out(sleeps, arena.seed):
            job = arena.job(store, staleness=staleness, workers=2, worker_timeout_ms=60_000)
            with arena.crew(job, result, mutants=mutants) as crew:
                crew.start_all(1, 2)
                for point in itertools.islice(at, naps):
                    _impostor(crew, next(numbers), point, arena.random.randint(1, 12))
            result.faults[mode] = naps
            arena.say(f"{mode}: {naps} ids taken")
    return result.close()


def _impostor(crew: Crew, nap: int, point: str, seq: int) -> None:
    """Put two incarnations of w1 to sleep, each at the point of its push number `seq`; wake the replaced one first."""
    arms = {"point": point, "nth": points.passages(point, seq), "signal": signal.SIGSTOP}
    both = []
    for who in ("replaced", "present"):
        both.append(crew.start(f"w1.{nap}.{who}", "worker", name="w1", takeover=True, arm=arms))
        crew.until(lambda: _noted(crew) == len(both))
    crew.count()
    replaced, present = both
    crew.kill(replaced, signal.SIGCONT)
    crew.until(lambda: replaced.ended)
    version = crew.job.state().version
    crew.kill(present, signal.SIGCONT)
    crew.until(lambda: crew.job.state().version > version + 3)
