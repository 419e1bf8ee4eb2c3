"""Contributions whose stored bytes do not match their digest, and workers killed while units are handed out."""

from __future__ import annotations

from collections import deque

from chaos.arena import MODES, Arena
from chaos.crew import shuffled
from chaos.report import Result


def contributions_are_damaged(
    arena: Arena, units: int = 300, share: float = 0.1, mutants: tuple[str, ...] = ()
) -> Result:
    """Damage a `share` of the contributions behind the workers' backs: each is rejected, and its unit done again."""
    result = Result("damage", "stored bytes damaged", arena.seed, needed=int(units * share / 2))
    with arena.server() as store:
        for mode, staleness in MODES.items():
            job = arena.job(store, staleness=staleness, units=units)
            with arena.crew(job, mutants=mutants) as crew:
                crew.start_all(3, 2, damages=share)
                crew.run()
                entries = store.client.call("XRANGE", job.access.keys.commits, "-", "+")
                result.faults[mode] = sum(fields["kind"] == "reject" for _, fields in entries)
                result.verdict.add(arena.judge(store, crew))
            arena.say(f"{mode}: {result.faults[mode]} rejected")
            if mutants and result.verdict.problems:
                break
    return result.close()


def workers_are_killed(arena: Arena, units: int = 600, each: int = 8, mutants: tuple[str, ...] = ()) -> Result:
    """Kill processes where a push or a commit is answered, in every mode: half-done work must not count."""
    result = Result("kills", "killed where a push or commit is answered", arena.seed)
    with arena.server() as store:
        for mode, staleness in MODES.items():
            arms: dict[str, deque[tuple[str, int]]] = {
                "worker": shuffled(arena.random, ["push sent, no reply yet", "push answered"], each, 20),
                "aggregator": shuffled(arena.random, ["commit sent, no reply yet", "commit answered"], each, 20),
            }
            job = arena.job(store, staleness=staleness, units=units)
            with arena.crew(job, arms=arms, mutants=mutants) as crew:
                crew.start_all(3, 2)
                crew.run(limit_s=60)
                result.faults[mode] = crew.fired.total()
                result.verdict.add(arena.judge(store, crew))
            if mutants and result.verdict.problems:
                break
    return result.close()
