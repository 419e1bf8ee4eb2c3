"""Workers and aggregators are killed at every named point, and at random: nothing is lost, nothing counts twice.
And contributions whose stored bytes do not match their digest."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Mapping
from typing import Any

import kvps
from chaos import points
from chaos.arena import MODES, Arena
from chaos.crew import shuffled
from chaos.report import Result

_UNITS = 8000
Modes = Mapping[str, Mapping[str, Any]]
"""The name of a mode -> the settings of its jobs."""
_CLIPPED = kvps.SGD(lr=0.05, momentum=0.5, clip_norm=1.0)
QUORUMS: Modes = {
    "next": {"quorum": 2, "late": "next"},
    "drop": {"quorum": 2, "late": "drop", "optimizer": _CLIPPED},
    "drop, with grace": {"quorum": 1, "late": "drop", "grace_ms": 10, "reduction": "median"},
    "buffer": {"staleness": -1, "quorum": 2, "staleness_scaling": "inverse", "optimizer": _CLIPPED},
}


def named_points(
    arena: Arena,
    each: int = 30,
    most: int = 40,
    units: int = _UNITS,
    workers: Collection[str] = points.WORKER,
    aggregators: Collection[str] = points.AGGREGATOR,
    mutants: tuple[str, ...] = (),
    **settings: Any,
) -> Result:
    """Kill at each point `each` times per mode. Even jobs have units, odd ones rounds; half report deaths at once."""
    result, names = Result("points", "killed at a named point", arena.seed), [*workers, *aggregators]
    with arena.server() as store:
        for mode, staleness in MODES.items():
            arms: dict[str, deque[tuple[str, int]]] = {
                "worker": shuffled(arena.random, list(workers), each, most),
                "aggregator": shuffled(arena.random, list(aggregators), each, most),
            }
            fired: Counter[str] = Counter()
            number = 0
            while any(arms.values()):
                job = arena.job(store, staleness=staleness, units=units * (1 - number % 2), **settings)
                with arena.crew(job, result, arms=arms, at_once=number % 4 < 2, mutants=mutants) as crew:
                    crew.start_all(3, job.layout.shards, rounds=units // 3)
                    crew.run(limit_s=60 if mutants else 120)
                    fired += crew.fired
                if mutants and result.verdict.problems:
                    return result.close()
                number += 1
                left = sum(map(len, arms.values()))
                arena.say(
                    f"{mode}: {sum(fired.values())} kills, {left} to come, {result.verdict.contributions} contributions"
                )
            result.faults |= {f"{mode}, {point}": fired[point] for point in names}
            missing = [point for point in names if fired[point] < each]
            result.problems += [f"{mode}: {point} was reached {fired[point]} times, not {each}" for point in missing]
    result.needed = each * len(MODES) * len(names)
    return result.close()


def at_random(arena: Arena, kills: int = 600, every_s: float = 0.12, units: int = 6000, **settings: Any) -> Result:
    """Kill random children at random instants, in every mode, until `kills` were killed."""
    result = Result("random", "killed at random", arena.seed, needed=kills)
    modes: Modes = {mode: {"staleness": staleness} | settings for mode, staleness in MODES.items()}
    return _at_random(arena, result, modes, kills, every_s, units)


def with_quorums(arena: Arena, kills: int = 400, every_s: float = 0.12, units: int = 6000) -> Result:
    """As `at_random`, of jobs whose versions wait for a quorum, with either rule for late ones; some clip gradients."""
    result = Result("quorum", "killed at random, with a quorum", arena.seed, needed=kills)
    return _at_random(arena, result, QUORUMS, kills, every_s, units)


def _at_random(arena: Arena, result: Result, modes: Modes, kills: int, every_s: float, units: int) -> Result:
    with arena.server() as store:
        for mode, settings in modes.items():
            done, number = 0, 0
            while done < kills / len(modes):
                job = arena.job(store, units=units * (number % 2), **settings)
                with arena.crew(job, result, at_once=number % 4 < 2) as crew:
                    crew.start_all(3, job.layout.shards, rounds=units // 3)
                    crew.run(arena.random, every_s)
                    done += crew.kills.total()
                number += 1
                arena.say(f"{mode}: {done} kills, {result.verdict.contributions} contributions")
            result.faults[mode] = done
    return result.close()


def contributions_are_damaged(
    arena: Arena, units: int = 300, share: float = 0.1, mutants: tuple[str, ...] = ()
) -> Result:
    """Damage a `share` of the contributions behind the workers' backs: each is rejected, and its unit done again."""
    result = Result("damage", "stored bytes damaged", arena.seed, needed=int(units * share / 2))
    with arena.server() as store:
        for mode, staleness in MODES.items():
            job = arena.job(store, staleness=staleness, units=units)
            with arena.crew(job, result, mutants=mutants) as crew:
                crew.start_all(3, 2, damages=share)
                crew.run()
                entries = store.client.call("XRANGE", job.access.keys.commits, "-", "+")
                result.faults[mode] = sum(fields["kind"] == "reject" for _, fields in entries)
            arena.say(f"{mode}: {result.faults[mode]} rejected")
            if mutants and result.verdict.problems:
                break
    return result.close()
