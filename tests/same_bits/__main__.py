"""Train two small jobs in many ways, and show that the sha256 of the weights is one for each. `make same-bits` runs it.

Oracles say which: the digits in plain NumPy, and a CNN with dropout in plain PyTorch. Every unit is in exactly one
commit, read from the log.
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
from same_bits.cnn import CNN
from same_bits.resumed import resumed
from same_bits.ways import COUNTS, Run
from same_bits.workers import DIGITS

Way = Callable[[Arena], Iterator[Run]]
_CNN_PLACES = (("Redis", 1), ("shared memory", 1))

FULL: Mapping[str, Way] = {
    "threads": partial(ways.on_threads, counts=3 * COUNTS),
    "processes": ways.on_processes,
    "fire": ways.under_fire,
    "cluster": ways.on_a_cluster,
    "redis": ways.redis_is_killed,
    "checkpoints": ways.from_checkpoints,
    "scripts": commands.run,
    "up": commands.up,
    "resumed": resumed,
    "cnn-turns": partial(ways.on_threads, kind=CNN, counts=COUNTS[:4], places=_CNN_PLACES, backups=(3,)),
    "cnn-scripts": partial(commands.run, kind=CNN, counts=COUNTS[:4], number=8),
    "cnn-checkpoints": partial(ways.from_checkpoints, kind=CNN, number=3),
    "faults": faults.planted,
}
SHORT: Mapping[str, Way] = {
    "threads": partial(ways.on_threads, counts=(3,)),
    "fire": partial(ways.under_fire, number=2),
    "redis": partial(ways.redis_is_killed, number=1, kills=1),
    "checkpoints": partial(ways.from_checkpoints, number=1),
    "scripts": partial(commands.run, counts=(3,), number=1, kills=1),
    "cnn-turns": partial(ways.on_threads, kind=CNN, counts=(3,), places=_CNN_PLACES[:1], backups=(3,)),
    "cnn-scripts": partial(commands.run, kind=CNN, counts=(3,), number=1),
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
    problems = "; ".join(run.problems)
    if run.fault:
        return f"planted {run.fault}: {f'caught, as {problems}' if problems else 'NOT CAUGHT'}"
    return problems or f"{run.kind.expected()[:12]} as wanted"


def _sums(what: str, runs: list[Run]) -> str:
    """Return how many runs there were, how many kills, and how many runs differ."""
    kills = sum((run.kills for run in runs), Counter[str]())
    killed = ", ".join(f"{role} {count}" for role, count in sorted(kills.items())) or "none"
    differ = sum(bool(run.problems) for run in runs)
    return f"{what}: {len(runs)} runs, {kills.total()} kills ({killed}), {differ} that differ"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m same_bits", description=__doc__.split("\n\n")[0])
    parser.add_argument("--short", action="store_true", help="small numbers")
    parser.add_argument("--only", action="append", choices=list(FULL), help="run this way; may be given several times")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000, help="(default: another each time)")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers end with this process
    print(f"seed {arguments.seed}")
    for kind in (DIGITS, CNN):
        print(f"{kind.name}: the oracle says {kind.expected()}", flush=True)
    runs: list[Run] = []
    for name, way in (SHORT if arguments.short else FULL).items():
        if not arguments.only or name in arguments.only:
            runs += train(name, way, arguments.seed)
    honest, planted = [run for run in runs if not run.fault], [run for run in runs if run.fault]
    for kind in (DIGITS, CNN):
        print(_sums(kind.name, [run for run in honest if run.kind is kind]))
    print(_sums("all", honest))
    caught = sum(bool(run.problems) for run in planted)
    print(f"{caught} of {len(planted)} planted faults caught")
    return int(caught < len(planted) or any(run.problems for run in honest))


if __name__ == "__main__":
    sys.exit(main())
