"""`kvps_bench links`: rounds over hosts whose links have a given rate, and the bytes that pass over them.

On one host bytes cost almost nothing. Between hosts they are what a round waits for: so the bytes on each link are
counted, beside the least that must pass there. Each host has a worker, a node of a cluster, and an aggregator near it.
"""

from __future__ import annotations

import secrets
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvps_cli.output import say

from kvps.arrays.formats import format_of
from kvps.arrays.layout import DTYPE
from kvps.connection.slots import Address
from kvps.machine.paths import server_program
from kvps.optim import SGD
from kvps.server.data_host import DataHost
from kvps_bench.crew import Lab, Member, crew, together
from kvps_bench.hosts import Host, Network, NoHosts
from kvps_bench.result import Bar, Figures, Row
from kvps_bench.roles import LR, Aggregator, Role, Worker, model
from kvps_bench.round import check_weights
from kvps_bench.turns import Case, Ratio, Times, in_turns

_ROUNDS = 2
_PORT = 6402
_BAR, _MOST_RATIO = 15, 1.05
MOST_WORKERS = 100


class Setting(NamedTuple):
    """How arrays are sent."""

    gradient_format: str
    weight_format: str
    exact: bool = True  # whether the weights after any number of rounds are known

    def least(self, workers: int, nbytes: int) -> float:
        """Return the bytes that must pass over each link in each direction: a host has an equal part of the shards, so
        the others' gradients and weights of that part pass, and its own of theirs."""
        items = nbytes // DTYPE.itemsize
        each = sum(format_of(name).nbytes(items) for name in (self.gradient_format, self.weight_format))
        return (workers - 1) / workers * each


SETTINGS: Mapping[str, Setting] = {
    "fp32": Setting("fp32", "fp32"),
    "bf16 both ways": Setting("bf16", "bf16"),
    "int8 both ways": Setting("int8", "int8", exact=False),
    "topk:0.01, weights in bf16": Setting("topk:0.01", "bf16", exact=False),
}
NOTES = (
    "Hosts are namespaces of this machine, each with a link that `tc` holds to the rate in each direction. All of them "
    "share the cores of this machine. Each has a worker, a node of a cluster, and an aggregator near that, which has "
    "the shard of that node.",
    "In and out are MB a round on the link that had most, as its interface counted them. Least is what must pass "
    "there: (W - 1) / W of the gradient and of the weights in each direction.",
    "Gradients are constants, and all of them are sent; topk chooses among equals.",
)


class Actors:
    """Any number of roles in one process: to start a process for each would take longer than to measure them."""

    def __init__(self) -> None:
        self._roles: dict[str, Any] = {}

    def add(self, name: str, make: Callable[..., Any], *arguments: Any) -> None:
        """Make a role of this name."""
        self._roles[name] = make(*arguments)

    def ask(self, name: str, method: str, *arguments: Any) -> Any:
        """Have a role's method called, and return its result."""
        return getattr(self._roles[name], method)(*arguments)

    def form(self, addresses: Sequence[str]) -> None:
        """Make one cluster of the nodes on hosts, which only a process on a host can reach."""
        first, *others = (Address(address, _PORT) for address in addresses)
        DataHost(first, None).come(None)
        for node in others:
            DataHost(node, None).come(first)

    def close(self) -> None:
        for role in self._roles.values():
            role.close()


class Keeper(Role):
    """Makes jobs."""

    def create(self, nbytes: int, settings: Mapping[str, Any]) -> str:
        """Create a job of `nbytes` with these settings; return its name."""
        return self.store.create_job(f"bench-{secrets.token_hex(4)}", model(nbytes), **settings).name


@dataclass
class Counter:
    """Counts the bytes on the links of hosts while a case runs."""

    hosts: Sequence[Host]
    case: Case
    rounds: int = 0

    def __post_init__(self) -> None:
        self._sums = [[0, 0] for _ in self.hosts]

    def __call__(self) -> Sequence[float]:
        before = [host.counted() for host in self.hosts]
        took = self.case()
        for sums, (sent, received), host in zip(self._sums, before, self.hosts, strict=True):
            sent_now, received_now = host.counted()
            sums[0] += sent_now - sent
            sums[1] += received_now - received
        self.rounds += len(took)
        return took

    @property
    def bytes(self) -> tuple[float, float]:
        """The bytes a round that came in and went out on the link that had most."""
        sent, received = (max(way) / self.rounds for way in zip(*self._sums, strict=True))
        return received, sent


@contextmanager
def _cluster(hosts: Sequence[Host]) -> Iterator[list[str]]:
    """Start a node on each host, and make one cluster of them; yield their HOST:PORT."""
    with ExitStack() as stack:
        for host in hosts:
            stack.enter_context(node(host))
        (founder,) = stack.enter_context(crew((hosts[0], Actors)))
        founder("form", [host.address for host in hosts])
        yield [f"{host.address}:{_PORT}" for host in hosts]


@contextmanager
def node(host: Host, cluster: bool = True) -> Iterator[str]:
    """Start a server on a host, alone or to be a node of a cluster; yield its URL."""
    with tempfile.TemporaryDirectory(prefix="kvps-bench-") as folder:
        command = [server_program(), "--bind", host.address, "--port", str(_PORT), "--protected-mode", "no"]
        command += ["--save", "", "--dir", folder]
        command += ["--cluster-enabled", "yes", "--cluster-announce-ip", host.address] if cluster else []
        process = host.start(*command, stdout=subprocess.PIPE, text=True)
        assert process.stdout
        for line in process.stdout:
            if "Ready to accept connections" in line:
                break
        else:
            raise NoHosts(f"the server on {host.name} ended with {process.wait()}")
        process.stdout.close()  # a server that says more, and whom nobody reads, would wait for ever
        try:
            yield f"redis://{host.address}:{_PORT}"
        finally:
            host.signal(process, signal.SIGTERM)
            process.wait()


@contextmanager
def _job(
    near: Sequence[str], aggregators: list[Member], workers: list[Member], setting: Setting, nbytes: int, rounds: int
) -> Iterator[Case]:
    """Yield a case of a job's rounds; at the end, check the weights where they are known."""
    url = f"redis://{near[0]}"
    settings = {"workers": len(workers), "shards": len(near), "optimizer": SGD(lr=LR)}
    settings |= {
        "transport": "redis",
        "gradient_format": setting.gradient_format,
        "weight_format": setting.weight_format,
    }
    keeper = secrets.token_hex(4)
    aggregators[0]("add", keeper, Keeper, url)
    job = aggregators[0]("ask", keeper, "create", nbytes, settings)
    for node, member in zip(near, aggregators, strict=True):
        member("add", job, Aggregator, url, job, None, node)
    for rank, member in enumerate(workers):
        member("add", job, Worker, url, job, rank)
    together(workers, "ask", job, "rounds", 1)  # with the first pull, which belongs to no round
    yield lambda: together(workers, "ask", job, "more_rounds", rounds)[0]
    if setting.exact:
        bits = 2.0**-8 if setting.weight_format == "bf16" else 0.0
        check_weights(together(workers, "ask", job, "weights"), len(workers), bits)


def measure(lab: Lab, nbytes: int, workers: Sequence[int], gbits: Sequence[float]) -> Iterator[Row | Bar]:
    """Measure rounds of `nbytes` with each number of workers over links of each rate in Gbit/s."""
    for gbit in gbits:
        for count in workers:
            say(f"{gbit:g} Gbit/s, {count} workers")
            why, measured = "", dict[str, tuple[Times, Counter]]()
            try:
                measured = _measured(nbytes, count, gbit, lab.turns, 1 if lab.quick else _ROUNDS)
            except NoHosts as refused:
                why = str(refused)
            for case, setting in SETTINGS.items():
                about = {"gbit": gbit, "workers": count, "mb": nbytes / 1e6}
                what = f"{gbit:g} Gbit/s, {nbytes / 1e6:g} MB, {count} workers: bytes over the least, {case}"
                if why:
                    yield Row(case, "tcp", about, why=why)
                    yield Bar(_BAR, what, True, _MOST_RATIO, None, why)
                    continue
                times, counter = measured[case]
                least = setting.least(count, nbytes)
                yield Row(case, "tcp", about, times, _figures(counter, least, times, measured["fp32"][0]))
                ratio = Ratio.of([moved / least for moved in counter.bytes])
                yield Bar(_BAR, what, True, _MOST_RATIO, ratio)


def _figures(counter: Counter, least: float, times: Times, fp32: Times) -> Figures:
    received, sent = (round(moved / 1e6, 1) for moved in counter.bytes)
    over = round(times.over(fp32).median, 3)
    return {"in_mb": received, "out_mb": sent, "least_mb": round(least / 1e6, 1), "over_fp32": over}


def _measured(nbytes: int, workers: int, gbit: float, turns: int, rounds: int) -> dict[str, tuple[Times, Counter]]:
    counters: dict[str, Counter] = {}
    with Network(workers, gbit * 1e9) as hosts, ExitStack() as stack:
        near = stack.enter_context(_cluster(hosts))
        serving = stack.enter_context(crew(*((host, Actors) for host in hosts)))
        working = stack.enter_context(crew(*((host, Actors) for host in hosts)))
        for case, setting in SETTINGS.items():
            running = _job(near, serving, working, setting, nbytes, rounds)
            counters[case] = Counter(hosts, stack.enter_context(running))
        times = in_turns(counters, turns)
    return {case: (each, counters[case]) for case, each in times.items()}
