"""Negative controls: kvps with one check taken out must be caught by the family of faults that the check is for."""

from __future__ import annotations

import re
from collections.abc import Callable

from chaos import kills, memory, replicas, replies, sleepers
from chaos.arena import Arena
from chaos.mutants import MUTANTS
from chaos.report import Result

_ANSWERED = ("push sent, no reply yet", "push answered", "commit sent, no reply yet", "commit answered")
FAMILIES: dict[str, Callable[..., Result]] = {
    "replies": lambda arena, mutants: replies.replies_are_lost(arena, 40, one_in=4, units=90, mutants=mutants),
    "sleepers": lambda arena, mutants: sleepers.holders_sleep(arena, 3, 6, mutants=mutants),
    "impostors": lambda arena, mutants: sleepers.workers_sleep(arena, 6, mutants=mutants),
    "damage": lambda arena, mutants: kills.contributions_are_damaged(arena, mutants=mutants),
    "memory": lambda arena, mutants: memory.readers_are_slow(arena, 50, 200, mutants=mutants),
    "replicas": lambda arena, mutants: replicas.sentinels_and_two_replicas(arena, 2, mutants=mutants),
    "kills": lambda arena, mutants: kills.named_points(
        arena, 8, 20, 200, _ANSWERED[:2], _ANSWERED[2:], mutants=mutants
    ),
}

_DOES_NOT_FIT = "(Attribute|Import|Name|Type)Error|must hold exactly once|nonexistent global variable"


def mutants_are_caught(arena: Arena, names: tuple[str, ...] = ()) -> Result:
    """Run every mutant under its family. It is caught if the harness reports a problem, or the job does not end."""
    chosen = names or tuple(MUTANTS)
    result = Result("controls", "checks taken out, and caught", arena.seed, needed=len(chosen))
    caught = 0
    for name in chosen:
        mutant = MUTANTS[name]
        try:
            problems = FAMILIES[mutant.family](arena, mutants=(name,)).problems
        except Exception as error:  # a mutant may break anything; the report names the error
            if re.search(_DOES_NOT_FIT, f"{type(error).__name__}: {error}"):
                raise  # the mutant does not fit the code that it is to change
            problems = [f"{type(error).__name__}: {str(error).strip().splitlines()[-1][:150]}"]
        problems = [problem for problem in problems if "faults were injected" not in problem]
        result.faults[f"{name}: {mutant.says}"] = 1
        caught += bool(problems)
        result.figures[name] = problems[0][:150] if problems else "not caught"
        if not problems:
            result.problems.append(f"{name} was not caught")
        arena.say(f"{name}: {result.figures[name]}")
    result.figures["caught"] = f"{caught} of {len(chosen)}"
    return result.close()
