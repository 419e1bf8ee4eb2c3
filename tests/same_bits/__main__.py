"""Train one small job in many ways, and show that the sha256 of its weights is one. `make same-bits` runs it.

An oracle in plain NumPy says which. Every unit is in exactly one commit, read from the log.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from chaos.arena import Arena, arena

from same_bits import commands, faults, ways
from same_bits.job import expected
from same_bits.ways import Run

Way = Callable[[Arena], Iterator[Run]]

FULL: Mapping[str, Way] = {
    "threads": partial(ways.on_threads, repeats=3),
    "processes": ways.on_processes,
    "fire": ways.under_fire,
    "cluster": ways.on_a_cluster,
    "redis": ways.redis_is_killed,
    "checkpoints": ways.from_checkpoints,
    "scripts": commands.run,
    "up": commands.up,
    "faults": faults.planted,
}
SHORT: Mapping[str, Way] = {
    "threads": partial(ways.on_threads, counts=(3,)),
    "fire": partial(ways.under_fire, number=2),
    "redis": partial(ways.redis_is_killed, number=1, kills=1),
    "checkpoints": partial(ways.from_checkpoints, number=1),
    "faults": faults.planted,
}


def train(name: str, way: Way, seed: int) -> list[Run]:
    """Return the runs of a way, in an arena of its own; print each."""
    runs, began = [], time.monotonic()
    with arena(seed) as here:
        for run in way(here):
            runs.append(run)
            print(f"{name:12} {time.monotonic() - began:6.1f} s  {run.did}: {_result(run)}", flush=True)
    return runs


def _result(run: Run) -> str:
    if not run.fault:
        return "; ".join(run.problems) or f"{expected()[:12]} as wanted"
    return f"planted {run.fault}: {f'caught, as {run.problems[0]}' if run.problems else 'NOT CAUGHT'}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m same_bits", description=__doc__.split("\n\n")[0])
    parser.add_argument("--short", action="store_true", help="small numbers")
    parser.add_argument("--only", action="append", choices=list(FULL), help="run this way; may be given several times")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000, help="(default: another each time)")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers end with this process
    print(f"seed {arguments.seed}; the oracle says {expected()}", flush=True)
    runs: list[Run] = []
    for name, way in (SHORT if arguments.short else FULL).items():
        if not arguments.only or name in arguments.only:
            runs += train(name, way, arguments.seed)
    honest, planted = [run for run in runs if not run.fault], [run for run in runs if run.fault]
    kills = sum((run.kills for run in honest), Counter[str]())
    killed = ", ".join(f"{role} {count}" for role, count in sorted(kills.items()))
    differ, caught = sum(bool(run.problems) for run in honest), sum(bool(run.problems) for run in planted)
    print(f"{len(honest)} runs, {kills.total()} kills ({killed}), {differ} that differ")
    print(f"{caught} of {len(planted)} planted faults caught")
    return int(differ > 0 or caught < len(planted))


if __name__ == "__main__":
    sys.exit(main())
