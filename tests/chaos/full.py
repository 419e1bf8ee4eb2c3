"""Redis has little memory, and somebody else fills it while a job trains: what is refused is said, nothing is lost."""

from __future__ import annotations

import time
from contextlib import closing

import redis
from redis.exceptions import OutOfMemoryError

from chaos.arena import MODES, Arena
from chaos.crew import Crew
from chaos.report import Result

ROOM = "24mb"
PATIENCE_S = 0.3  # of the workers, and not 10 s, so that a full server is long full for them after a second


def memory_is_filled(
    arena: Arena, fills: int = 60, hold_s: float = 1.0, modes: tuple[str, ...] = tuple(MODES)
) -> Result:
    """In each mode another client fills the server's memory again and again, keeps it full, and gives it back.

    Every other time for longer than the workers' patience, so that they are told (ServerFull), end, and are started
    again; else they wait. Afterwards the job goes on by itself, each time.
    """
    result = Result("full", "memory filled by somebody else", arena.seed, needed=fills)
    counted = {"long fills": 0, "refused to the job": 0, "refused and said so": 0}
    with arena.server("--maxmemory", ROOM, "--maxmemory-policy", "noeviction") as store:
        for number, mode in enumerate(modes):
            job = arena.job(store, staleness=MODES[mode], worker_timeout_ms=60_000)
            share = fills // len(modes) + (number < fills % len(modes))
            with arena.crew(job) as crew, closing(Ballast(store.url)) as ballast:
                crew.start_all(3, 2, patience_s=PATIENCE_S, computes_s=0.001)
                crew.until(lambda j=job: j.state().version > 3)
                for fill in range(share):
                    long = fill % 2 == 0
                    counted["refused to the job"] += _fill(crew, ballast, hold_s if long else 0.0)
                    if mode == "ASP":  # nobody waits for anybody: what was acknowledged needs no more than itself
                        crew.until(lambda j=job: not j.client.call("XLEN", j.keys.inbox))
                    counted["long fills"] += long
                    ballast.drop()
                    version = job.state().version
                    crew.until(lambda j=job, v=version: j.state().version > v + 3)
                counted["refused and said so"] += crew.refusals
                crew.finish()
                result.verdict.add(arena.judge(store, crew))
            result.faults[mode] = share
            arena.say(
                f"{mode}: {share} fills, {crew.refusals} times told, {result.verdict.contributions} contributions"
            )
    result.figures |= counted
    return result.close()


def _fill(crew: Crew, ballast: Ballast, seconds: float) -> int:
    """Keep the server full until the job was refused something, and how often it was then.

    With `seconds` at least for so long, and until a child was told.
    """
    deadline, told = time.monotonic() + seconds, crew.refusals
    before = ballast.refused_to_others()

    def over() -> bool:
        ballast.fill()  # what commits have freed is taken at once
        refused = ballast.refused_to_others() > before and time.monotonic() > deadline
        return refused and (not seconds or crew.refusals > told)

    crew.until(over)
    return ballast.refused_to_others() - before


class Ballast:
    """Somebody else's keys, as many as fit. It counts its own refusals, so that those of the others are known."""

    SIZES = (1 << 18, 1 << 14, 1 << 10, 1 << 6)

    def __init__(self, url: str) -> None:
        self._redis = redis.Redis.from_url(url, protocol=2)  # which says at once that the server is full: Client waits
        self._keys: list[str] = []
        self._refused = 0

    def fill(self) -> None:
        """Write values, ever smaller ones, until not even the smallest fits."""
        for size in self.SIZES:
            try:
                while True:
                    self._redis.set(f"ballast:{len(self._keys)}", bytes(size))
                    self._keys.append(f"ballast:{len(self._keys)}")
            except OutOfMemoryError:
                self._refused += 1

    def drop(self) -> None:
        """Take all away again."""
        self._redis.delete(*self._keys)
        self._keys.clear()

    def close(self) -> None:
        self._redis.close()

    def refused_to_others(self) -> int:
        """How many commands of others the server has refused for its memory, by its own count."""
        told = self._redis.info("errorstats").get("errorstat_OOM", {"count": 0})
        return int(told["count"]) - self._refused
