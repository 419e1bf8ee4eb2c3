"""Redis has little memory, and another client fills it while a job trains: refusals are reported, nothing is lost."""

from __future__ import annotations

import time
from contextlib import closing

import redis
from redis.exceptions import OutOfMemoryError

from chaos.arena import MODES, Arena
from chaos.crew import Crew
from chaos.report import Result

ROOM = "24mb"
PATIENCE_S = 0.3  # of the workers, and not 10 s, so that a server full for a second exceeds it


def memory_is_filled(
    arena: Arena, fills: int = 60, hold_s: float = 1.0, modes: tuple[str, ...] = tuple(MODES)
) -> Result:
    """In each mode, another client fills the server's memory again and again, keeps it full, and frees it.

    Every other fill outlasts the workers' patience: they get ServerFull, end, and are started again. In the other fills
    they wait. After each fill the job continues by itself.
    """
    result = Result("full", "memory filled by another client", arena.seed, needed=fills)
    counted = {"long fills": 0, "commands refused": 0, "workers that reported it": 0}
    with arena.server("--maxmemory", ROOM, "--maxmemory-policy", "noeviction") as store:
        for number, mode in enumerate(modes):
            job = arena.job(store, staleness=MODES[mode], worker_timeout_ms=60_000)
            share = fills // len(modes) + (number < fills % len(modes))
            with arena.crew(job, result) as crew, closing(Ballast(store.url)) as ballast:
                crew.start_all(3, 2, patience_s=PATIENCE_S, computes_s=0.001)
                crew.until(lambda j=job: j.state().version > 3)
                for fill in range(share):
                    long = fill % 2 == 0
                    counted["commands refused"] += _fill(crew, ballast, hold_s if long else 0.0)
                    if mode == "ASP":  # no worker waits for another: what was acknowledged can be committed at once
                        crew.until(lambda j=job: not j.access.client.call("XLEN", j.access.keys.inbox))
                    counted["long fills"] += long
                    ballast.drop()
                    version = job.state().version
                    crew.until(lambda j=job, v=version: j.state().version > v + 3)
                counted["workers that reported it"] += crew.refusals
            result.faults[mode] = share
            arena.say(
                f"{mode}: {share} fills, {crew.refusals} times told, {result.verdict.contributions} contributions"
            )
    result.figures |= counted
    return result.close()


def _fill(crew: Crew, ballast: Ballast, seconds: float) -> int:
    """Keep the server full until it has refused commands of the job; return how many.

    With `seconds`, keep it full for at least that long, and until a child has ended with ServerFull. No child is told
    if the gradients of all workers are accepted, and the room for their commit went to the other client.
    """
    deadline, told = time.monotonic() + seconds, crew.refusals
    before = ballast.refused_to_others()

    def over() -> bool:
        ballast.fill()  # takes at once what commits have freed
        refused = ballast.refused_to_others() > before and time.monotonic() > deadline
        return refused and (not seconds or crew.refusals > told or _all_wait(crew))

    crew.until(over)
    return ballast.refused_to_others() - before


def _all_wait(crew: Crew) -> bool:
    """Return whether every worker waits for the commit of what it has pushed."""
    return all(member.pending for member in crew.job.state().members.values())


class Ballast:
    """Another client's keys, as many as fit. It counts its own refusals, so that those of the job are known."""

    SIZES = (1 << 18, 1 << 14, 1 << 10, 1 << 6)

    def __init__(self, url: str) -> None:
        self._redis = redis.Redis.from_url(url, protocol=2)  # not Client, which waits when the server is full
        self._keys: list[str] = []
        self._refused = 0

    def fill(self) -> None:
        """Write ever smaller values, until not even the smallest fits."""
        for size in self.SIZES:
            try:
                while True:
                    self._redis.set(f"ballast:{len(self._keys)}", bytes(size))
                    self._keys.append(f"ballast:{len(self._keys)}")
            except OutOfMemoryError:
                self._refused += 1

    def drop(self) -> None:
        """Delete all these keys."""
        self._redis.delete(*self._keys)
        self._keys.clear()

    def close(self) -> None:
        self._redis.close()

    def refused_to_others(self) -> int:
        """Return how many commands of other clients the server has refused for want of memory, by its own count."""
        told = self._redis.info("errorstats").get("errorstat_OOM", {"count": 0})
        return int(told["count"]) - self._refused
