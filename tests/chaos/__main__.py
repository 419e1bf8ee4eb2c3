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

FULL: dict[str, Scenario] = {
    "points": kills.named_points,
    "random": kills.at_random,
    "quorum": kills.with_quorums,
    "sleepers": sleepers.holders_sleep,
    "impostors": sleepers.workers_sleep,
    "redis": servers.redis_is_killed,
    "cuts": servers.file_is_cut,
    "failover": clusters.masters_fail_over,
    "failover-memory": partial(clusters.masters_fail_over, kills=42, durability="memory"),
    "slots": clusters.slots_move,
    "sentinel": watched.sentinels_fail_over,
    "replicas": replicas.sentinels_and_two_replicas,
    "replicas-cluster": replicas.a_cluster_with_two_replicas,
    "replies": replies.replies_are_lost,
    "flush": replies.scripts_are_flushed,
    "full": full.memory_is_filled,
    "shm-points": partial(memory.shared, kills.named_points, each=20, **points.SHARED),
    "shm-random": partial(memory.shared, kills.at_random, kills=300),
    "shm-sleepers": partial(memory.shared, sleepers.holders_sleep, sleeps=30, duels=6, at=memory.NAPS),
    "shm-readers": partial(memory.shared, memory.readers_are_slow, mirror_s=1.0, note=memory.READ),
    "shm-redis": partial(memory.shared, servers.redis_is_killed, kills=30, pause_s=0.3),
    "shm-hosts": partial(memory.shared, memory.hosts_are_lost, mirror_s=0.05, note=memory.LOST),
    "times": times.faults_are_timed,
    "controls": controls.mutants_are_caught,
}
SHORT: dict[str, Scenario] = {
    "points": partial(kills.named_points, each=1, most=8, units=90),
    "random": partial(kills.at_random, kills=9, every_s=0.1, units=60),
    "quorum": partial(kills.with_quorums, kills=8, every_s=0.1, units=60),
    "sleepers": partial(sleepers.holders_sleep, sleeps=12, duels=3),
    "impostors": partial(sleepers.workers_sleep, sleeps=6),
    "redis": partial(servers.redis_is_killed, kills=4, pause_s=0.2),
    "cuts": partial(servers.file_is_cut, cuts=30),
    "failover": partial(clusters.masters_fail_over, kills=3),
    "failover-memory": partial(clusters.masters_fail_over, kills=2, durability="memory"),
    "slots": partial(clusters.slots_move, moves=2),
    "sentinel": partial(watched.sentinels_fail_over, kills=2),
    "replicas": partial(replicas.sentinels_and_two_replicas, failovers=2),
    "replicas-cluster": partial(replicas.a_cluster_with_two_replicas, failovers=2),
    "replies": partial(replies.replies_are_lost, faults=8, units=45),
    "flush": partial(replies.scripts_are_flushed, seconds=1.0),
    "full": partial(full.memory_is_filled, fills=2, hold_s=0.5, modes=("BSP", "ASP")),
    "shm-points": partial(memory.shared, kills.named_points, each=1, most=8, units=90, **points.SHARED_ALONE),
    "shm-sleepers": partial(memory.shared, sleepers.holders_sleep, sleeps=5, duels=0, at=memory.NAPS),
    "shm-readers": partial(memory.shared, memory.readers_are_slow, mirror_s=1.0, reads=6, units=50),
    "shm-redis": partial(memory.shared, servers.redis_is_killed, kills=2, pause_s=0.2),
    "shm-hosts": partial(memory.shared, memory.hosts_are_lost, mirror_s=0.05, losses=3, pause_s=0.2, each=1, units=150),
    "times": partial(times.faults_are_timed, known=2, unknown=1, lease_ms=300, worker_timeout_ms=600, slack_s=60),
    "controls": partial(controls.mutants_are_caught, names=("digest", "split")),
}


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
