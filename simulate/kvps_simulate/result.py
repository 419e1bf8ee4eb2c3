"""What a simulated run comes to: times, staleness, goodput, and what each resource did."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvps.arrays.layout import DTYPE, MOST_ITEMS
from kvps.config import SPECS
from kvps_simulate import demands
from kvps_simulate.job import Job
from kvps_simulate.settings import Constants, Setting

_OF_AGGREGATORS = (demands.AGGREGATOR, demands.AGGREGATOR_IN, demands.AGGREGATOR_OUT, demands.SERIAL)
_OF_WORKERS = (demands.WORKER, demands.WORKER_IN, demands.WORKER_OUT, demands.ROUND_TRIPS)
SCRIPTS, COMPUTING = "Redis core, scripts", "computing"


@dataclass(frozen=True)
class Result:
    """One simulated run.

    median_s, p95_s     of the rounds of all workers, from one pull to the next
    staleness, most_stale   of contributions, in versions: mean and most
    goodput             committed contributions a second
    busy                resource -> the part of the time in which it is busy; of those that each worker or aggregator
                        has, on average. The first is the bottleneck
    node_memory, aggregator_memory   in bytes, of the fullest
    node_in, node_out   bytes a second of the fullest data node, on average over the run
    beyond              what kvps itself refuses in this setting
    """

    setting: Setting
    median_s: float
    p95_s: float
    staleness: float
    most_stale: int
    goodput: float
    busy: dict[str, float]
    node_memory: float
    aggregator_memory: float
    node_in: float
    node_out: float
    versions: int
    lost: int
    evictions: int
    failovers: int
    simulated_s: float
    changes: int
    beyond: tuple[str, ...]

    @property
    def bottleneck(self) -> str:
        """The resource that is busy for the largest part of the time."""
        return next(iter(self.busy))

    @property
    def efficiency(self) -> float:
        """The part of the time in which workers compute what is committed."""
        return self.busy.get(COMPUTING, 0.0)

    def to_dict(self) -> dict[str, Any]:
        values = asdict(self) | {"bottleneck": self.bottleneck, "efficiency": self.efficiency}
        return values | {"setting": self.setting.to_dict(), "beyond": list(self.beyond)}


def simulate(setting: Setting, constants: Constants, watch: Callable[[Job], None] = lambda _: None) -> Result:
    """Simulate a run. Call `watch` with the job before it runs, for whoever looks how far it is."""
    job = Job(setting, constants)
    watch(job)
    record = job.run()
    times = sorted(seconds for each in record.rounds for seconds in each) or [record.end_s]
    committed = sum(number for _, number in record.commits)
    per_round = job.demands.round_bytes()
    share = job.demands.node_part * committed / setting.workers / record.end_s
    return Result(
        setting=setting,
        median_s=statistics.median(times),
        p95_s=_quantile(times, 0.95),
        staleness=statistics.fmean(record.staleness),
        most_stale=max(record.staleness),
        goodput=committed / record.end_s,
        busy=_busy(job),
        node_memory=job.demands.node_memory(),
        aggregator_memory=job.demands.aggregator_memory(),
        node_in=per_round["in"] * share,
        node_out=per_round["out"] * share,
        versions=len(record.commits),
        lost=record.lost,
        evictions=record.evictions,
        failovers=record.failovers,
        simulated_s=record.end_s,
        changes=record.changes,
        beyond=tuple(_beyond(setting)),
    )


def _quantile(ordered: Sequence[float], q: float) -> float:
    return ordered[min(len(ordered) - 1, round(q * (len(ordered) - 1)))]


def _busy(job: Job) -> dict[str, float]:
    """Return resource -> part of the time, from the busiest on. Scripts are apart from the bytes that Redis moves."""
    setting, record = job.demands.setting, job.record
    out: dict[str, float] = {COMPUTING: record.computed_s / setting.workers}
    for (kind, name), seconds in job.net.busy.items():
        members = setting.workers if name in _OF_WORKERS else setting.aggregators if name in _OF_AGGREGATORS else 1
        shown = name if name != demands.REDIS else SCRIPTS if kind == "scripts" else f"{name}, bytes"
        out[shown] = out.get(shown, 0.0) + seconds / members
    return {name: seconds / record.end_s for name, seconds in sorted(out.items(), key=lambda item: -item[1])}


def _beyond(setting: Setting) -> list[str]:
    """Return what kvps refuses, which a simulation may still ask about."""
    out = []
    for name in ("workers", "shards"):
        most = (SPECS[name].bounds or (0, 0))[1]
        if getattr(setting, name) > most:
            out.append(f"kvps takes at most {most:,} {name}")
    if setting.size > MOST_ITEMS * DTYPE.itemsize:
        out.append(f"kvps takes at most {MOST_ITEMS * DTYPE.itemsize / 1e9:.0f} GB of weights")
    return out
