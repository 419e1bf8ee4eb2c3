"""Run mutations by the ten thousand, and print what was run and what failed: `make fuzz`."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

from hostile.calls import MOST_SHARDS, MOST_WORKERS, honest
from hostile.fuzzer import Failure, Tally, run

_MANY = 1_000  # mutations, after which the calls of an honest job are measured too
_SHARE = 5_000  # mutations that one process makes, with a server of its own


def main() -> int:
    """Return 1 if anything failed."""
    parser = argparse.ArgumentParser(prog="hostile", description=__doc__)
    parser.add_argument("--mutations", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", type=int, help="make the mutation of this number alone")
    asked = parser.parse_args()
    numbers = list(range(asked.mutations)) if asked.only is None else [asked.only]
    share = max(1, min(_SHARE, -(-len(numbers) // asked.processes)))
    shares = [numbers[i : i + share] for i in range(0, len(numbers), share)]
    tally, began = Tally(), time.monotonic()
    fresh = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(asked.processes, len(shares)), fresh, max_tasks_per_child=1) as pool:
        for done in pool.map(run, [asked.seed] * len(shares), shares):
            tally.add(done)
            print(f"{tally.mutations} mutations, {len(tally.failures)} failures", file=sys.stderr, flush=True)
            for failure in done.failures:  # at once: the whole run takes long
                print(f"  {failure.number}: {failure.reader}: {failure.what}", file=sys.stderr, flush=True)
    _show(tally, asked.seed, time.monotonic() - began)
    return 1 if tally.failures else 0


def _show(tally: Tally, seed: int, seconds: float) -> None:
    print(f"{'reader':40} {'runs':>8} {'refused':>8}")
    for name, runs in sorted(tally.readers.items()):
        print(f"{name:40} {runs:8} {tally.refused[name]:8}")
    print(f"\n{'kind of mutation':40} {'made':>8}")
    for kind, made in sorted(tally.kinds.items()):
        print(f"{kind:40} {made:8}")
    runs = sum(tally.readers.values())
    print(f"\nseed {seed}: {tally.mutations} mutations, {runs} runs of readers in {seconds:.0f} s")
    print(f"the peak of memory grew by {tally.growth / 2**20:.1f} MiB at most in one run")
    call, number = tally.longest
    print(f"the longest call of a script: {call}, in mutation {number}")
    if tally.mutations >= _MANY:
        workers, shards = honest().values()
        print(f"in an honest job of {MOST_WORKERS:,} workers: {workers}; of {MOST_SHARDS:,} shards: {shards}")
    places = Counter(failure.place for failure in tally.failures)
    first: dict[str, Failure] = {}
    for failure in tally.failures:
        first.setdefault(failure.place, failure)
    for place, count in places.most_common():
        f = first[place]
        print(f"\n{count} times: {place}\n  {f.what}\n  reader: {f.reader}; scene: {f.scene}\n  {f.mutation}")
        print(f"  again: python -m hostile --seed {seed} --only {f.number}\n{f.trace}")
    print(f"{len(tally.failures)} failures at {len(places)} places")


if __name__ == "__main__":
    sys.exit(main())
