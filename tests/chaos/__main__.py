"""`python -m chaos`: runs the scenarios, prints the table, writes docs/reliability.md and docs/reliability.json.

A scenario whose results an earlier run kept there is not run again, unless `--only` names it or `--fresh` is given.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from chaos import (
    clusters,
    controls,
    full,
    kills,
    memory,
    points,
    replicas,
    replies,
    report,
    servers,
    sleepers,
    times,
    watched,
)
from chaos.arena import Arena, arena
from chaos.report import Result

Scenario = Callable[[Arena], Result]

SCENARIOS: dict[str, tuple[Callable[..., Result], dict[str, Any], dict[str, Any]]] = {
    "points": (kills.named_points, {}, {"each": 1, "most": 8, "units": 90}),
    "random": (kills.at_random, {}, {"kills": 9, "every_s": 0.1, "units": 60}),
    "quorum": (kills.with_quorums, {}, {"kills": 8, "every_s": 0.1, "units": 60}),
    "sleepers": (sleepers.holders_sleep, {}, {"sleeps": 12, "duels": 3}),
    "impostors": (sleepers.workers_sleep, {}, {"sleeps": 6}),
    "redis": (servers.redis_is_killed, {}, {"kills": 4, "pause_s": 0.2}),
    "cuts": (servers.file_is_cut, {}, {"cuts": 30}),
    "failover": (clusters.masters_fail_over, {}, {"kills": 3}),
    "failover-memory": (partial(clusters.masters_fail_over, durability="memory"), {"kills": 42}, {"kills": 2}),
    "slots": (clusters.slots_move, {}, {"moves": 2}),
    "sentinel": (watched.sentinels_fail_over, {}, {"kills": 2}),
    "replicas": (replicas.sentinels_and_two_replicas, {}, {"failovers": 2}),
    "replicas-cluster": (replicas.a_cluster_with_two_replicas, {}, {"failovers": 2}),
    "replies": (replies.replies_are_lost, {}, {"faults": 8, "units": 45}),
    "flush": (replies.scripts_are_flushed, {}, {"seconds": 1.0}),
    "full": (full.memory_is_filled, {}, {"fills": 2, "hold_s": 0.5, "modes": ("BSP", "ASP")}),
    "shm-points": (
        partial(memory.shared, kills.named_points),
        {"each": 20, **points.SHARED},
        {"each": 1, "most": 8, "units": 90, **points.SHARED_ALONE},
    ),
    "shm-random": (partial(memory.shared, kills.at_random), {"kills": 300}, {"kills": 9, "every_s": 0.1, "units": 60}),
    "shm-sleepers": (
        partial(memory.shared, sleepers.holders_sleep, at=memory.NAPS),
        {"sleeps": 30, "duels": 6},
        {"sleeps": 5, "duels": 0},
    ),
    "shm-readers": (
        partial(memory.shared, memory.readers_are_slow, mirror_s=1.0, note=memory.READ),
        {},
        {"reads": 6, "units": 50},
    ),
    "shm-redis": (
        partial(memory.shared, servers.redis_is_killed),
        {"kills": 30, "pause_s": 0.3},
        {"kills": 2, "pause_s": 0.2},
    ),
    "shm-hosts": (
        partial(memory.shared, memory.hosts_are_lost, mirror_s=0.05, note=memory.LOST),
        {},
        {"losses": 3, "pause_s": 0.2, "each": 1, "units": 150},
    ),
    "times": (
        times.faults_are_timed,
        {},
        {"known": 2, "unknown": 1, "lease_ms": 300, "worker_timeout_ms": 600, "slack_s": 60},
    ),
    "controls": (controls.mutants_are_caught, {}, {"names": ("digest", "split")}),
}
"""The scenario of each name, and what it is given in its whole form and in the short one."""
FULL: dict[str, Scenario] = {name: partial(run, **whole) for name, (run, whole, _) in SCENARIOS.items()}
SHORT: dict[str, Scenario] = {name: partial(run, **short) for name, (run, _, short) in SCENARIOS.items()}


def run(name: str, scenario: Scenario, seed: int, loud: bool = True) -> Result:
    """Run one scenario in its own arena."""
    began = time.monotonic()
    with arena(seed, loud) as here:
        result = scenario(here)
    result.seconds = time.monotonic() - began
    return result


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m chaos", description=__doc__.split("\n\n")[0])
    parser.add_argument("--short", action="store_true", help="small numbers, and no files are written")
    parser.add_argument("--only", action="append", choices=list(FULL), help="run this one; may be given several times")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000, help="(default: another each time)")
    parser.add_argument("--fresh", action="store_true", help="run again what is kept from earlier runs")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers end with this process
    kept = {} if arguments.short else report.load()
    others = {name: result for name, result in kept.items() if name not in FULL}  # measured once; nothing runs them now
    results = {} if arguments.fresh else dict(kept)
    for name, scenario in (SHORT if arguments.short else FULL).items():
        if name not in arguments.only if arguments.only else name in results:
            continue
        print(f"{name}, seed {arguments.seed}", flush=True)
        results[name] = run(name, scenario, arguments.seed)
        for problem in results[name].problems:
            print(f"  NOT AS PROMISED: {problem}")
        results = {known: results[known] for known in FULL if known in results} | others
        if not arguments.short:
            report.save(results)
            report.write_page(results)
    for result in results.values():
        if result.times:
            print(report.timed(result), end="\n\n")
    print(report.table(results))
    return int(any(result.problems for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
