"""Compare the simulation with real rounds on this machine, and print the error of each case.

    python -m kvps_bench.validate --workers 2,4,8

Several nodes are masters of a cluster on this machine, each with an aggregator near it. Other programs take some of
this machine's cores meanwhile. The simulation is given what the real rounds had: the cores that were idle or theirs,
and the speed of the machine in the same seconds, as the reference tells it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

from kvps_simulate.job import Job
from kvps_simulate.settings import Constants, Setting

from kvps.errors import KvpsError
from kvps_bench.cost import Cost
from kvps_bench.crew import Member, Place, crew, place, together
from kvps_bench.nodes import local_nodes
from kvps_bench.phases import LARGE, QUICK_BYTES, Reference, reference
from kvps_bench.roles import Aggregator, Worker, model, temporary_job

_REFERENCES = 3  # rounds before each turn, and as many behind it
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Turn:
    """Some real rounds: seconds of the median round, the cores that they could have, the bytes that the server
    received and sent in all of them and in the pull before them, and how fast the machine was."""

    round_s: float
    cores: float
    rounds: int
    nbytes: float
    reference: float


@dataclass(frozen=True)
class Case:
    """One real job beside its simulation; `error` is the simulation's over the real time, less 1: median, least and
    greatest of the turns."""

    nodes: int
    workers: int
    mb: float
    gradient_format: str
    real_ms: float
    least_ms: float
    greatest_ms: float
    cores: float
    simulated_ms: float
    error: float
    least_error: float
    greatest_error: float
    bytes_error: float


class Servers(NamedTuple):
    """The servers of a case: where the job is, and the nodes of a cluster, each of which has an aggregator near it."""

    where: Place
    near: Sequence[str] = ()


def real_turns(
    servers: Servers, over: str, setting: Setting, speed: Reference, rounds: int, turns: int
) -> Iterator[Turn]:
    """Yield turns of a real job; the first, which is not yielded, is a warm-up."""
    where, near = servers
    url, workers = where.urls[over], setting.workers
    formats = {"gradient_format": setting.gradient_format, "weight_format": setting.weight_format}
    settings = {"workers": workers, "shards": setting.shards, **formats}
    with temporary_job(where, over, model(int(setting.size)), **settings) as job:
        serving = [(Aggregator, url, job.name, None, node) for node in near or [""]]
        with crew(*serving, *((Worker, url, job.name, rank) for rank in range(workers))) as members:
            aggregators, working = members[: len(serving)], members[len(serving) :]

            def cost() -> Cost:
                return Cost.so_far(job, time.monotonic(), _ids(aggregators), _ids(working))

            for number in range(turns + 1):
                reference_s = speed.seconds(_REFERENCES)
                idle_s, before = _idle_s(), cost()
                took = together(working, "rounds", rounds)[0]
                spent, now = cost() - before, _idle_s()
                ours = spent.server_s + spent.aggregator_s + spent.workers_s
                cores = min(float(os.cpu_count() or 1), max(0.1, (now - idle_s + ours) / spent.at_s))
                reference_s = (reference_s + speed.seconds(_REFERENCES)) / 2
                if number:
                    nbytes = spent.received_bytes + spent.sent_bytes
                    yield Turn(statistics.median(took), cores, rounds, nbytes, reference_s)


def _ids(members: Iterable[Member]) -> list[int]:
    return [member.process.pid or 0 for member in members]


def _idle_s() -> float:
    """Return how long all cores together were idle so far, in seconds. What the kernel does for the loopback (softirq)
    is in the times of the processes that it interrupts."""
    fields = list(map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:]))
    return (fields[3] + fields[4]) / _TICKS


def compared(setting: Setting, turns: list[Turn], constants: Constants) -> Case:
    """Return the case of real turns beside one simulation for each, with the cores that the turn had."""
    simulated, errors = [], []
    demands = None
    for turn in turns:
        job = Job(replace(setting, cores=turn.cores), constants.on_machine(turn.reference))
        times = [seconds for each in job.run().rounds[1:] for seconds in each]
        simulated.append(statistics.median(times))
        errors.append(simulated[-1] / turn.round_s - 1)
        demands = job.demands
    assert demands is not None
    before = setting.workers * demands.pulled_bytes
    moved = [(turn.rounds * sum(demands.round_bytes().values()) + before) / turn.nbytes for turn in turns]
    real = [turn.round_s for turn in turns]
    return Case(
        setting.nodes,
        setting.workers,
        setting.size / 1e6,
        setting.gradient_format,
        1000 * statistics.median(real),
        1000 * min(real),
        1000 * max(real),
        statistics.median(turn.cores for turn in turns),
        1000 * statistics.median(simulated),
        statistics.median(errors),
        min(errors),
        max(errors),
        statistics.median(moved) - 1,
    )


@contextmanager
def _servers(nodes: int) -> Iterator[Servers]:
    """Yield one server, or a cluster of several nodes."""
    if nodes == 1:
        with place(None) as started:
            yield Servers(started)
        return
    with local_nodes(nodes) as near, place(f"redis://{near[0]}") as started:
        yield Servers(started, near)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", default="2,4,8")
    parser.add_argument("--nodes", default="1,2,4", help="masters of a cluster; 1 is a server that is none")
    parser.add_argument("--mb", type=float, default=40)
    parser.add_argument("--formats", default="fp32", help="of gradients")
    parser.add_argument("--over", choices=("tcp", "unix"), default="tcp")
    parser.add_argument("--rounds", type=int, default=10, help="of a turn")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--constants", type=Path)
    parser.add_argument("--quick", action="store_true", help="with a reference as small as calibrate's with --quick")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    constants, cases = Constants.load(options.constants), []
    nbytes = QUICK_BYTES if options.quick else LARGE
    with ExitStack() as stack:
        speed = stack.enter_context(reference(stack.enter_context(place(None)), options.over, nbytes))
        for nodes, workers, name in itertools.product(*_numbers(options), options.formats.split(",")):
            setting = Setting(
                workers=workers, nodes=nodes, size=4 * int(options.mb * 250_000), compute_s=0, latency_s=0,
                topology="local", cores=os.cpu_count() or 1, rounds=8, gradient_format=name,
            )  # fmt: skip
            with _servers(nodes) as servers:
                turns = list(real_turns(servers, options.over, setting, speed, options.rounds, options.turns))
            cases.append(compared(setting, turns, constants))
            if not options.json:
                _show(cases[-1])
    if options.json:
        print(json.dumps([asdict(case) for case in cases]))


def _numbers(options: argparse.Namespace) -> tuple[list[int], list[int]]:
    """Return the numbers of nodes and of workers. Raises ValueError."""
    nodes, workers = ([int(word) for word in text.split(",")] for text in (options.nodes, options.workers))
    return nodes, workers


def _show(case: Case) -> None:
    print(
        f"{case.nodes} nodes, {case.workers} workers, {case.mb:g} MB {case.gradient_format}: real "
        f"{case.real_ms:.0f} ms ({case.least_ms:.0f} to {case.greatest_ms:.0f}), {case.cores:.2f} cores; "
        f"simulated {case.simulated_ms:.0f} ms: "
        f"{case.error:+.0%} ({case.least_error:+.0%} to {case.greatest_error:+.0%}), bytes {case.bytes_error:+.1%}",
        flush=True,
    )


if __name__ == "__main__":
    try:
        main()
    except (KvpsError, ValueError) as error:
        raise SystemExit(f"validate: {error}") from None
