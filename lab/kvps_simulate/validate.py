"""Compare the simulation with real rounds on this machine, and print the error of each case.

    python -m kvps_simulate.validate --nodes 1,2,4 --workers 2,4,8 --formats fp32,bf16

Several nodes are masters of a cluster on this machine, each with an aggregator near it. Other programs take some of
this machine's cores meanwhile. The simulation is given what the real rounds had: the cores that were idle or theirs,
and the speed of the machine in the same seconds, as the reference tells it: the processor time of a round of 2 workers.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvps_bench.cost import Cost
from kvps_bench.crew import Member, Place, crew, free_port, place, together
from kvps_bench.roles import Aggregator, Worker, model, temporary_job

from kvps.arrays.layout import CHUNK_BYTES
from kvps.connection.slots import Address
from kvps.job import Job as RealJob
from kvps.server import cluster_node
from kvps.server.data_host import DataHost
from kvps_simulate.job import Job
from kvps_simulate.settings import Constants, Setting

_REFERENCES = 6  # rounds before each turn, and as many behind it
_TICKS = os.sysconf("SC_CLK_TCK")


class Rounds:
    """A real job whose rounds are measured."""

    def __init__(self, job: RealJob, aggregators: list[Member], workers: list[Member]) -> None:
        self._job, self._workers = job, workers
        self._ids = [[member.process.pid or 0 for member in members] for members in (aggregators, workers)]

    def measured(self, number: int) -> tuple[float, Cost]:
        """Return the seconds of the median round, and what all of them cost."""
        before = Cost.so_far(self._job, time.monotonic(), *self._ids)
        took: list[float] = together(self._workers, "rounds", number)[0]
        return statistics.median(took), Cost.so_far(self._job, time.monotonic(), *self._ids) - before

    def processor_s(self) -> float:
        """Return the processor seconds of a round, of all processes together."""
        return self.measured(_REFERENCES)[1].processor_s / _REFERENCES


@contextmanager
def real_job(where: Place, nbytes: int, near: Sequence[str] = (), workers: int = 2, **more: Any) -> Iterator[Rounds]:
    """Yield a job with an aggregator near each node. It has done a few rounds, which get their memory."""
    url = where.urls["tcp"]
    with temporary_job(where, "tcp", model(nbytes), workers=workers, **more) as job:
        serving = [(Aggregator, url, job.name, None, node) for node in near or [""]]
        with crew(*serving, *((Worker, url, job.name, rank) for rank in range(workers))) as members:
            rounds = Rounds(job, members[: len(serving)], members[len(serving) :])
            rounds.measured(2)
            yield rounds


@contextmanager
def servers(nodes: int) -> Iterator[tuple[Place, Sequence[str]]]:
    """Yield one server, or a cluster on addresses of the loopback (Linux has many) with the HOST:PORT of its nodes."""
    with ExitStack() as stack:
        port = free_port(most=cluster_node.MOST_PORT)
        near = [Address(f"127.78.0.{number + 1}", port) for number in range(nodes)] if nodes > 1 else []
        for node in near:
            stack.enter_context(cluster_node.started(node, None, None))
        for number, node in enumerate(near):
            DataHost(node, None).come(near[0] if number else None)
        yield stack.enter_context(place(f"redis://{near[0]}" if near else None)), list(map(str, near))


def compared(setting: Setting, reference: Rounds, rounds: int, turns: int) -> dict[str, Any]:
    """Return a real job beside its simulation: the error is the simulated time over the real one, less 1."""
    constants, real, simulated = Constants.load(), list[float](), list[float]()
    formats = {"gradient_format": setting.gradient_format, "weight_format": setting.weight_format}
    settings: dict[str, Any] = {"workers": setting.workers, "shards": setting.shards, **formats}
    with servers(setting.nodes) as (where, near), real_job(where, int(setting.size), near, **settings) as job:
        for turn in range(turns + 1):
            reference_s, idle_s = reference.processor_s(), _idle_s()
            took, spent = job.measured(rounds)
            cores = min(setting.cores, max(0.1, (_idle_s() - idle_s + spent.processor_s) / spent.at_s))
            at_this_speed = constants.on_machine((reference_s + reference.processor_s()) / 2)
            if turn:  # the first is a warm-up
                done = Job(replace(setting, cores=cores), at_this_speed).run()
                simulated.append(statistics.median(s for each in done.rounds[1:] for s in each))
                real.append(took)
    errors = [mine / its - 1 for mine, its in zip(simulated, real, strict=True)]
    times = {"real_ms": 1000 * statistics.median(real), "simulated_ms": 1000 * statistics.median(simulated)}
    of_errors = {"error": statistics.median(errors), "least_error": min(errors), "greatest_error": max(errors)}
    return {"nodes": setting.nodes, "workers": setting.workers, **formats, **times, **of_errors}


def _idle_s() -> float:
    """Return how long all cores together were idle so far, in seconds. What the kernel does for the loopback (softirq)
    is in the times of the processes that it interrupts."""
    fields = list(map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:]))
    return (fields[3] + fields[4]) / _TICKS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("nodes", "1"), ("workers", "2,4"), ("formats", "fp32"), ("mb", "40")):
        parser.add_argument(f"--{name}", default=default)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--turns", type=int, default=5)
    asked = parser.parse_args()
    nodes, workers = ([int(word) for word in text.split(",")] for text in (asked.nodes, asked.workers))
    with place(None) as where, real_job(where, 40 * CHUNK_BYTES) as reference:
        for number, count, name in itertools.product(nodes, workers, asked.formats.split(",")):
            setting = Setting(
                workers=count, nodes=number, size=4 * int(float(asked.mb) * 250_000), compute_s=0, latency_s=0,
                local=True, cores=os.cpu_count() or 1, rounds=8, gradient_format=name,
            )  # fmt: skip
            print(json.dumps(compared(setting, reference, asked.rounds, asked.turns)), flush=True)


if __name__ == "__main__":
    main()
