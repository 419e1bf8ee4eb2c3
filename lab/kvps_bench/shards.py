"""`kvps_bench shards`: what a version costs with few and many shards: time, and the server's commands.

The model is the same and tiny, one worker pushes it, and one aggregator, or two, hold the shards in turn. With two the
gradient is clipped as well, so that they tell each other the squares of their parts.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from functools import partial

from kvps_cli.output import say

from kvps.connection.client import Client
from kvps.errors import counted
from kvps.optim import SGD
from kvps_bench.crew import Lab, Member, crew
from kvps_bench.result import Bar, Figures, Row
from kvps_bench.roles import LR, Aggregator, Worker, model, temporary_job
from kvps_bench.turns import Ratio, in_turns

SHARDS = "1,10,100,1000"
_MODEL_BYTES = 4_012  # 1,003 float32 items, for 1,000 shards at the most
_CLIP_NORM = 1.0
_SILENCE_MS = 3_600_000
_BAR, _MOST_GROWTH = 19, 1.5

NOTES = (
    f"One worker, over a Unix socket; the model has {_MODEL_BYTES} bytes. Commands are those that the server runs, in "
    "scripts and outside; `script us` is its time in scripts. Both are of a shard's part of a version.",
    "The worker timeout and the lease are an hour here: renewals, three a lease for each shard, are not counted.",
)


def measure(lab: Lab, counts: Sequence[int]) -> Iterator[Row | Bar]:
    """Measure jobs with so many shards. Nothing else may use the server."""
    for aggregators in (1, 2):
        commands = {}
        for count in counts if aggregators == 1 else [count for count in counts if count > 1]:
            say(f"{counted(count, 'shard')}, {counted(aggregators, 'aggregator')}")
            row, commands[count] = _measured(lab, count, aggregators)
            yield row
        many, few = max(commands), min((count for count in commands if count >= 10), default=max(commands))
        ratio = Ratio.of([commands[many] / commands[few]]) if many > few else None
        what = f"commands a shard, {many} shards over {few}, {counted(aggregators, 'aggregator')}"
        yield Bar(_BAR, what, True, _MOST_GROWTH, ratio, "" if ratio else "needs 10 shards, and more")


def _measured(lab: Lab, count: int, aggregators: int) -> tuple[Row, float]:
    """Return the row of a job, and its commands a shard."""
    place, rounds = lab.place, 2 if lab.quick else 5
    url, optimizer = place.urls["unix"], SGD(lr=LR, clip_norm=_CLIP_NORM if aggregators > 1 else 0.0)
    each: list[tuple[float, float]] = []
    patient = {"worker_timeout_ms": _SILENCE_MS, "lease_ms": _SILENCE_MS}
    with temporary_job(place, "unix", model(_MODEL_BYTES), shards=count, optimizer=optimizer, **patient) as job:
        holders = [(Aggregator, url, job.name, list(range(a, count, aggregators))) for a in range(aggregators)]
        with crew(*holders, (Worker, url, job.name, 0)) as (*_, worker):
            times = in_turns({"job": partial(_turn, place.store.client, worker, rounds, each)}, lab.turns)["job"]
    commands, script_s = (statistics.median(turn[i] for turn in each[1:]) / rounds / count for i in range(2))
    more: Figures = {"commands_a_shard": round(commands, 1), "script_us_a_shard": round(1e6 * script_s, 1)}
    settings: Figures = {"shards": count, "aggregators": aggregators}
    return Row("clipped" if aggregators > 1 else "kvps", "unix", settings, times, more), commands


def _turn(client: Client, worker: Member, rounds: int, each: list[tuple[float, float]]) -> Sequence[float]:
    """Return the seconds of each round; note what the server did for all of them."""
    before = _server(client)
    seconds: list[float] = worker("rounds", rounds)
    after = _server(client)
    each.append((after[0] - before[0], after[1] - before[1]))
    return seconds


def _server(client: Client) -> tuple[float, float]:
    """Return how many commands a server has run, and its seconds in scripts."""
    stats = client.call("INFO", "commandstats")
    script_us = sum(int(stat["usec"]) for name, stat in stats.items() if name in ("cmdstat_eval", "cmdstat_evalsha"))
    return sum(int(stat["calls"]) for stat in stats.values()), script_us / 1e6
