"""Over shared memory: the same faults as over Redis, readers of memory that is reused, and the loss of the memory."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from typing import Any

from helpers.internals import replaced, segments_of
from kvps_aggregator.shard import mirror

from chaos import servers
from chaos.arena import MODES, Arena
from chaos.crew import Crew
from chaos.report import Result
from chaos.servers import Kept, Losses
from kvps.arrays import layout
from kvps.job import Job

SHM: dict[str, Any] = {"transport": "shm", "shards": 1}
_MIRROR_S = 0.02  # between two mirrors: so few that one is always being made
_ITEMS = 128  # of a chunk: the small model has four chunks, which are made on several threads
_SHARED = 'The jobs have `transport="shm"` and four chunks. Redis is given a version every 20 ms.'
READ = """\
A slow reader computes for 10 ms on weights. It counts if two later versions are committed when it is done: the next
version would have reused that memory, had it not been in use. With one byte of the next version in a gradient, the
replay would differ; without the lock it does (`lock`, below). Redis is given a version every second."""
LOST = """\
The host is lost when all of a job's processes are killed, one right after another in any order, and the directory of
its segments is removed. Redis keeps running, as it would on another host. Contributions acknowledged since the version
that Redis was last given are lost with the host; `lost` counts what is missing beyond them. The log and the aggregator
report each time how many versions that were, and both are checked. Afterwards each unit counts once, and so does each
round of each worker."""
NAPS = ("before commit", "between segments of a version", "after reducing", "mirror sent, no reply yet", "")


def shared(
    scenario: Callable[..., Result], arena: Arena, *, mirror_s: float = _MIRROR_S, note: str = _SHARED, **how: Any
) -> Result:
    """Run a scenario over shared memory. Its jobs have several chunks, and give Redis a version every `mirror_s`."""
    with replaced(layout, "CHUNK_ITEMS", _ITEMS), replaced(mirror, "EVERY_S", mirror_s):
        result = scenario(arena, **SHM | how)
    result.name, result.title = f"shm-{result.name}", f"{result.title}, over shared memory"
    result.note = note
    return result


def readers_are_slow(
    arena: Arena, reads: int = 1000, units: int = 1000, mutants: tuple[str, ...] = (), **settings: Any
) -> Result:
    """Run workers that compute for as long as several versions take, on weights that stay where they were pulled.

    Count the contributions whose weights died meanwhile: their memory was due to be the next version's. With one byte
    of that version, a contribution would not be what a replay makes of its own version.
    """
    result = Result("readers", "weights in use while their memory was due for reuse", arena.seed, needed=reads)
    with arena.server() as store:
        for mode, staleness in {"SSP": 4, "ASP": -1}.items():
            done = 0
            while done < reads / 2 and not result.verdict.problems:
                job = arena.job(store, staleness=staleness, units=units, **SHM | settings)
                with arena.crew(job, result, mutants=mutants) as crew:
                    crew.start_all(2, 1)
                    for number in range(2, 6):
                        crew.start(f"w{number}", "worker", computes_s=0.01)
                    crew.run()
                    plans = [commit.plan for commit in job.log()]
                    done += sum(c.base < plan.version - 3 for plan in plans for c in plan.contributions)
            result.faults[mode] = done
            arena.say(f"{mode}: {done} of {result.verdict.contributions} contributions on dead weights")
    return result.close()


def hosts_are_lost(
    arena: Arena, losses: int = 60, pause_s: float = 0.3, each: int = 5, units: int = 3000, **settings: Any
) -> Result:
    """Lose the host a few times in each job. Odd jobs have units, even ones rounds; each must count once at the end."""
    result = Result("hosts", "the host lost", arena.seed, needed=losses)
    rolled, acks = [], 0
    with arena.server() as store:
        for mode, staleness in MODES.items():
            done, number = 0, 0
            while done < losses / len(MODES):
                job = arena.job(store, staleness=staleness, units=units * (number % 2), **servers.PATIENT | settings)
                with arena.crew(job, result, at_once=False) as crew:
                    lost = Losses(job, crew.forgiven)
                    crew.start_all(3, 1, per_shard=2, log=True)
                    crew.until(lambda j=job: j.state().version > 3)
                    for _ in range(each):
                        if not crew.running:
                            break
                        crew.wait(pause_s * arena.random.uniform(0.2, 1.5))
                        done += _lose(arena, crew, lost)
                    crew.finish()
                    result.problems += lost.unsaid(arena.processes.log) + _rounds(job)
                rolled += lost.rollbacks
                acks += len(lost.lost)
                number += 1
            result.faults[mode] = done
            arena.say(f"{mode}: {done} hosts lost, {sum(rolled)} versions rolled back")
    result.figures["versions lost, always those since the mirror, all reported"] = sum(rolled)
    result.figures["most versions at once"] = max(rolled, default=0)
    result.figures["acknowledged contributions lost with them, and done again"] = acks
    return result.close()


def _lose(arena: Arena, crew: Crew, losses: Losses) -> bool:
    """Take the host down and up again; return False if the job had ended before."""
    job = crew.job
    dead = crew.kill_all(arena.random)
    before = job.state()
    if not dead or before.finished(job.config):
        for child in dead:
            crew.fork(child)
        return False
    kept = Kept.of(job, before)
    rolls_back = kept.version < before.version or bool(job.access.reader.inbox())
    assert segments_of(job)
    shutil.rmtree(segments_of(job).folder)
    for child in (child for child in dead if child.spec["role"] == "aggregator"):
        crew.fork(child)
    crew.until(lambda: segments_of(job).here and (job.state().history != before.history) == rolls_back)
    for child in (child for child in dead if child.spec["role"] == "worker"):
        crew.fork(child)
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
