"""One setting with more and fewer workers and data nodes: how far the design goes, and what breaks first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvps_simulate.result import Result, simulate
from kvps_simulate.settings import Constants, Setting

WORKERS = (4, 16, 64, 256, 1024, 4096, 10_000)
NODES = (1, 4, 16, 64, 256)
_ROUNDS = 3
_WORTH = 0.5


@dataclass(frozen=True)
class Limit:
    """How far a number of nodes goes: the most `workers` that still compute for half of the time (0: none do), and
    what is the `bottleneck` with the next larger number, or "" if there is none."""

    nodes: int
    workers: int
    bottleneck: str


def sweep(
    setting: Setting,
    constants: Constants,
    workers: Sequence[int] = WORKERS,
    nodes: Sequence[int] = NODES,
    seen: Callable[[Result], None] = lambda _: None,
) -> list[Result]:
    """Simulate every pair, and call `seen` with each result."""
    out = []
    for each in pairs(setting, workers, nodes):
        out.append(simulate(each, constants))
        seen(out[-1])
    return out


def pairs(setting: Setting, workers: Sequence[int] = WORKERS, nodes: Sequence[int] = NODES) -> list[Setting]:
    """Return the setting of each pair. Each node comes with as many aggregators and shards as in `setting`."""
    beside = setting.topology == "beside"
    return [_scaled(setting, number, each) for each in nodes for number in workers if each <= number or not beside]


def _scaled(setting: Setting, workers: int, nodes: int) -> Setting:
    aggregators = max(1, round(setting.aggregators * nodes / setting.nodes))
    shards = max(setting.shards, nodes, aggregators)
    return replace(
        setting,
        workers=workers,
        nodes=nodes,
        aggregators=aggregators,
        shards=shards,
        rounds=min(setting.rounds, _ROUNDS),
    )


def limits(results: Sequence[Result]) -> list[Limit]:
    """Return how far each number of nodes goes."""
    out = []
    for nodes in dict.fromkeys(r.setting.nodes for r in results):
        row = sorted((r for r in results if r.setting.nodes == nodes), key=lambda r: r.setting.workers)
        good = 0
        while good < len(row) and row[good].efficiency >= _WORTH:
            good += 1
        reached = row[good - 1].setting.workers if good else 0
        out.append(Limit(nodes, reached, row[good].bottleneck if good < len(row) else ""))
    return out
