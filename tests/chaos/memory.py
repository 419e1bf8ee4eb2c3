"""Over shared memory: the same faults as over Redis, readers of memory that is reused, and the loss of the memory."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from helpers.internals import segments_of
from kvps_aggregator.shard import mirror

from chaos import kills, points, servers, sleepers
from chaos.arena import MODES, Arena
from chaos.crew import Crew
from chaos.report import Result
from chaos.servers import Kept, Losses
from kvps.arrays import layout
from kvps.job import Job

SHM: dict[str, Any] = {"transport": "shm", "shards": 1}
_EVERY_S = 0.02  # between two mirrors: so few that one is always being made
_ITEMS = 128  # of a chunk: the small model has four chunks, which are made on several threads
_SHARED = """\
The jobs have `transport="shm"` and four chunks. Redis is given a version every 20 ms; in the jobs of
the slow readers, every second. A slow reader computes for 10 ms on weights. It counts if two later versions are
committed when it is done: the next version would have reused that memory, had it not been in use. With one byte of the
next version in a gradient, the replay would differ; without the lock it does (`lock`, below)."""
_LOST = """\
The host is lost when all of a job's processes are killed, one right after another in any order, and the directory of
its segments is removed. Redis keeps running, as it would on another host. Contributions acknowledged since the version
that Redis was last given are lost with the host; `lost` counts what is missing beyond them. The log and the aggregator
report each time how many versions that were, and both are checked. Afterwards each unit counts once, and so does each
round of each worker."""
_NAPS = ("before commit", "between segments of a version", "after reducing", "mirror sent, no reply yet", "")


@contextmanager
def _small_chunks() -> Iterator[None]:
    """Give jobs made inside the block several chunks; children of their crews get the same chunk size."""
    whole, layout.CHUNK_ITEMS = layout.CHUNK_ITEMS, _ITEMS
    try:
        yield
    finally:
        layout.CHUNK_ITEMS = whole


@contextmanager
def _mirrored(every_s: float) -> Iterator[None]:
    """Have children that are started inside the block give Redis a version so often."""
    before, mirror.EVERY_S = mirror.EVERY_S, every_s
    try:
        yield
    finally:
        mirror.EVERY_S = before


def _together(name: str, title: str, arena: Arena, parts: dict[str, Result], note: str) -> Result:
    """Return the parts as one result, with a row for each kind of fault."""
    whole = Result(name, title, arena.seed, note=note)
    for part, result in parts.items():
        whole.verdict.add(result.verdict)
        whole.problems += [problem for problem in result.problems if problem not in result.verdict.problems]
        whole.needed += result.needed
        whole.figures |= result.figures
        for key, count in result.faults.items():
            mode, _, what = key.partition(", ") if key.partition(", ")[0] in MODES else ("", "", key)
            what = f"{part}{', ' * bool(part and what)}{what}"
            whole.faults[f"{mode}, {what}".removeprefix(", ")] = count
            line = next((row for row in whole.rows if row["fault"] == what), None)
            if line is None:
                whole.rows.append(line := {"fault": what})
            line[mode or "all modes"] = count
    return whole.close()


def memory_is_shared(
    arena: Arena,
    at: Sequence[str] = (*points.SHARED_WORKER, *points.SHARED_AGGREGATOR),
    each: int = 20,
    most: int = 40,
    units: int = 8000,
    at_random: int = 300,
    every_s: float = 0.12,
    sleeps: int = 30,
    duels: int = 6,
    reads: int = 1000,
    slow_units: int = 1000,
) -> Result:
    """Kill at every point that exists over shared memory, and at random; put holders to sleep; run slow readers."""
    with _small_chunks():
        both = [[point for point in at if point in kind] for kind in (points.SHARED_WORKER, points.SHARED_AGGREGATOR)]
        with _mirrored(_EVERY_S):
            parts = {
                "": kills.named_points(arena, each, most, units, *both, **SHM),
                "at random": kills.at_random(arena, at_random, every_s, units, **SHM),
                "holder": sleepers.holders_sleep(arena, sleeps, duels, at=_NAPS, **SHM),
            }
        parts["readers"] = read = readers_are_slow(arena, reads, slow_units)  # no fault was injected for these
        read.figures = {f"{read.title}, contributions": read.injected}
        read.faults, read.needed = {}, 0
    return _together("memory", "over shared memory: killed, or asleep", arena, parts, _SHARED)


def readers_are_slow(arena: Arena, reads: int, units: int = 1000, mutants: tuple[str, ...] = ()) -> Result:
    """Run workers that compute for as long as several versions take, on weights that stay where they were pulled.

    Count the contributions whose weights died meanwhile: their memory was due to be the next version's. With one byte
    of that version, a contribution would not be what a replay makes of its own version.
    """
    result = Result("readers", "weights in use while their memory was due for reuse", arena.seed, needed=reads)
    with arena.server() as store:
        for mode, staleness in {"SSP": 4, "ASP": -1}.items():
            done = 0
            while done < reads / 2 and not result.verdict.problems:
                job = arena.job(store, staleness=staleness, units=units, **SHM)
                with arena.crew(job, mutants=mutants) as crew:
                    crew.start_all(2, 1)
                    for number in range(2, 6):
                        crew.start(f"w{number}", "worker", computes_s=0.01)
                    crew.run()
                    plans = [commit.plan for commit in job.log()]
                    done += sum(c.base < plan.version - 3 for plan in plans for c in plan.contributions)
                    result.verdict.add(arena.judge(store, crew))
            result.faults[mode] = done
            arena.say(f"{mode}: {done} of {result.verdict.contributions} contributions on dead weights")
    return result.close()


def memory_is_lost(
    arena: Arena, kills: int = 30, losses: int = 60, pause_s: float = 0.3, each: int = 5, units: int = 3000
) -> Result:
    """Kill Redis, with its file whole or cut; and lose the host: all processes, and all that was in their memory."""
    with _small_chunks(), _mirrored(_EVERY_S):
        redis = servers.redis_is_killed(arena, kills, pause_s, **SHM)
        redis.figures = {f"Redis killed: {what}": value for what, value in redis.figures.items()}
        parts = {"Redis killed": redis, "host lost": hosts_are_lost(arena, losses, pause_s, each, units)}
    return _together("memory-lost", "over shared memory: Redis killed, the host lost", arena, parts, _LOST)


def hosts_are_lost(arena: Arena, losses: int, pause_s: float, each: int, units: int) -> Result:
    """Lose the host a few times in each job. Odd jobs have units, even ones rounds; each must count once at the end."""
    result = Result("hosts", "the host lost", arena.seed, needed=losses)
    rolled, acks = [], 0
    with arena.server() as store, _mirrored(0.05):
        for mode, staleness in MODES.items():
            done, number = 0, 0
            while done < losses / len(MODES):
                job = arena.job(store, staleness=staleness, units=units * (number % 2), **servers.PATIENT, **SHM)
                lost = Losses(job)
                with arena.crew(job, at_once=False) as crew:
                    crew.start_all(3, 1, per_shard=2, log=True)
                    crew.until(lambda j=job: j.state().version > 3)
                    for _ in range(each):
                        if not crew.running:
                            break
                        crew.wait(pause_s * arena.random.uniform(0.2, 1.5))
                        done += _lose(arena, crew, lost)
                    crew.finish()
                    result.problems += lost.unsaid(arena.processes.log) + _rounds(job)
                    result.verdict.add(arena.judge(store, crew, frozenset(lost.lost)))
                rolled += lost.rollbacks
                acks += len(lost.lost)
                number += 1
            result.faults[mode] = done
            arena.say(f"{mode}: {done} hosts lost, {sum(rolled)} versions rolled back")
    result.figures["host lost: versions lost, always those since the mirror, all reported"] = sum(rolled)
    result.figures["host lost: most versions at once"] = max(rolled, default=0)
    result.figures["host lost: acknowledged contributions lost with them, and done again"] = acks
    return result.close()


def _lose(arena: Arena, crew: Crew, losses: Losses) -> bool:
    """Take the host down and up again; return False if the job had ended before."""
    job = crew.job
    dead = crew.kill_all(arena.random)
    before = job.state()
    if not dead or before.finished(job.config):
        for child in dead:
            crew.start_again(child)
        return False
    kept = Kept.of(job, before)
    rolls_back = kept.version < before.version or bool(job.access.reader.inbox())
    assert segments_of(job)
    shutil.rmtree(segments_of(job).folder)
    for child in (child for child in dead if child.spec["role"] == "aggregator"):
        crew.start_again(child)
    crew.until(lambda: segments_of(job).here and (job.state().history != before.history) == rolls_back)
    for child in (child for child in dead if child.spec["role"] == "worker"):
        crew.start_again(child)
    crew.until(lambda: job.state().version > kept.version or not crew.running)
    losses.fell(crew, kept, before.version, rolls_back)
    # Another aggregator may continue the job before this one has warned of the loss: the next loss might kill it first.
    crew.until(lambda: not losses.unwarned(arena.processes.log))
    return True


def _rounds(job: Job) -> list[str]:
    """Return what is wrong with a job's rounds: none may be left out, and none done twice."""
    if job.config.units:
        return []
    rounds = Counter((c.worker, c.round) for commit in job.log() for c in commit.plan.contributions)
    clock = job.state().clock
    whole = {(worker, number) for worker, count in clock.items() for number in range(1, count + 1)}
    twice = [one for one, count in rounds.items() if count > 1]
    return [f"rounds: {len(whole - set(rounds))} missing, {len(twice)} twice"] if twice or whole != set(rounds) else []
