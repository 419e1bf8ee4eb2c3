"""`kvps_bench links`: rounds over hosts whose links have a given rate, in turns with an all-reduce on the same links.

On one host bytes cost almost nothing. Between hosts they are what a round waits for: so the bytes on each link are
counted, beside the least that each way of doing a round must send.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvps.arrays.formats import format_of
from kvps.arrays.layout import DTYPE
from kvps.optim import SGD
from kvps_bench.crew import Member, Place, crew, together
from kvps_bench.hosts import Host, Network, NoHosts
from kvps_bench.layouts import LAYOUTS, Ground
from kvps_bench.result import NOT_INSTALLED, Bar, Figures, Result, Row, machine
from kvps_bench.roles import LR, Aggregator, Role, Worker, model
from kvps_bench.round import GLOO, NEAR_GLOO, check_weights, has_torch
from kvps_bench.turns import Case, Ratio, Times, in_turns

_ROUNDS = 2
_GLOO_PORT = 6401
_BAR = 15
MOST_WORKERS = 100


class Setting(NamedTuple):
    """How arrays are sent, and the most that a round may take, as a multiple of the all-reduce's time."""

    gradient_format: str
    weight_format: str
    limit: float | None = None
    exact: bool = True  # whether the weights after any number of rounds are known


SETTINGS: Mapping[str, Setting] = {
    "fp32": Setting("fp32", "fp32", 1.3),
    "bf16 both ways": Setting("bf16", "bf16", 0.7),
    "int8 both ways": Setting("int8", "int8", 0.4, exact=False),
    "topk:0.01, weights in bf16": Setting("topk:0.01", "bf16", exact=False),
}


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

    def figures(self) -> Figures:
        """Return the MB a round on the link that had most, in each direction."""
        sent, received = (max(way) / self.rounds / 1e6 for way in zip(*self._sums, strict=True))
        return {"in_mb": round(received, 1), "out_mb": round(sent, 1)}


@contextmanager
def _kvps(
    ground: Ground, aggregators: list[Member], workers: list[Member], setting: Setting, nbytes: int, rounds: int
) -> Iterator[Case]:
    """Yield a case of a job's rounds; at the end, check the weights where they are known."""
    settings = {"workers": len(workers), "shards": len(aggregators), "transport": "redis", "optimizer": SGD(lr=LR)}
    settings |= {"gradient_format": setting.gradient_format, "weight_format": setting.weight_format}
    keeper = secrets.token_hex(4)
    aggregators[0]("add", keeper, Keeper, ground.url)
    job = aggregators[0]("ask", keeper, "create", nbytes, settings)
    for number, member in enumerate(aggregators):
        own = (None, ground.near[number]) if ground.near else ([number],)
        member("add", job, Aggregator, ground.url, job, *own)
    for rank, member in enumerate(workers):
        member("add", job, Worker, ground.url, job, rank)
    together(workers, "ask", job, "rounds", 1)  # with the first pull, which belongs to no round
    yield lambda: together(workers, "ask", job, "more_rounds", rounds)[0]
    if setting.exact:
        near = 2.0**-8 if setting.weight_format == "bf16" else 0.0
        check_weights(together(workers, "ask", job, "weights"), SGD(lr=LR), len(workers), near)


@contextmanager
def _all_reduce(hosts: Sequence[Host], nbytes: int, rounds: int) -> Iterator[Case]:
    """Yield a case of rounds of gloo's all-reduce, a rank on each host; at the end, check the weights."""
    from kvps_bench.gloo import GlooWorker  # PyTorch is an extra

    where = (hosts[0].address, _GLOO_PORT)
    ranks = [((rank, len(hosts)), *where, host.interface) for rank, host in enumerate(hosts)]
    makers = [(host, GlooWorker, nbytes, 1, *each) for host, each in zip(hosts, ranks, strict=True)]
    with crew(*makers) as members:
        yield lambda: together(members, "rounds", rounds)[0]
        check_weights(together(members, "weights"), SGD(lr=LR), len(hosts), NEAR_GLOO)


Key = tuple[str, str]
"""Case and layout."""
_GLOO: Key = (GLOO, "ring")


class Measured(NamedTuple):
    """What was measured on links of one rate with one number of workers; or `why` nothing was."""

    gbit: float
    workers: int
    nbytes: int
    keys: Sequence[Key]
    cases: Mapping[Key, tuple[Times, Figures]]
    why: str = ""

    def over_gloo(self, key: Key) -> Ratio | None:
        """Return how much longer a case takes than the all-reduce; None unless both were measured."""
        if key in self.cases and _GLOO in self.cases:
            return self.cases[key][0].over(self.cases[_GLOO][0])
        return None


def measure(
    place: Place,
    nbytes: int,
    workers: Sequence[int],
    gbits: Sequence[float],
    layouts: Sequence[str],
    turns: int,
    quick: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> Result:
    """Measure rounds of `nbytes` over each layout, number of workers, and rate in Gbit/s."""
    rows: list[Row] = []
    bars: list[Bar] = []
    keys = [(f"kvps, {case}", layout) for layout in layouts for case in SETTINGS] + [_GLOO]
    for gbit in gbits:
        for count in workers:
            say(f"{gbit:g} Gbit/s, {count} workers")
            measured = Measured(gbit, count, nbytes, keys, {})
            try:
                cases = _measured(nbytes, count, gbit, layouts, turns, 1 if quick else _ROUNDS)
                measured = measured._replace(cases=cases)
            except NoHosts as refused:
                measured = measured._replace(why=str(refused))
            rows += [_row(measured, key) for key in keys]
            bars += [_bar(measured, key) for key in keys if key != _GLOO]
    return Result("links", turns, rows, bars, machine(place.store.client), _NOTES)


_NOTES = (
    "Hosts are namespaces of this machine, each with a link that `tc` holds to the rate in each direction. All of them "
    "share the cores of this machine.",
    "apart: server and aggregator are on a host of their own. beside: the server is beside the first worker, and each "
    "worker has an aggregator beside it, which has one shard; all bytes pass through that one server. cluster: each "
    "worker has a node of a cluster beside it, and an aggregator near that, which has the shard of that node.",
    "In and out are MB a round on the link that had most, as its interface counted them. Least is what must pass "
    "there: W gradients in and W times the weights out if apart, "
    "2 (W - 1) / W of the gradient in each direction for a ring and for a cluster. Where weights are pulled in "
    "bf16, an aggregator beside a worker sends the server the fp32 weights too.",
    "Gradients are constants, and all of them are sent; topk chooses among equals.",
)


def _measured(
    nbytes: int, workers: int, gbit: float, layouts: Sequence[str], turns: int, rounds: int
) -> dict[Key, tuple[Times, Figures]]:
    cases: dict[Key, Counter] = {}
    with Network(workers + 1, gbit * 1e9) as hosts, ExitStack() as stack:
        grounds = {name: stack.enter_context(LAYOUTS[name].opened(hosts)) for name in layouts}
        working = stack.enter_context(crew(*((host, Actors) for host in hosts[:-1])))
        for name, ground in grounds.items():
            serving = stack.enter_context(crew(*((host, Actors) for host in ground.aggregators)))
            for case, setting in SETTINGS.items():
                running = _kvps(ground, serving, working, setting, nbytes, rounds)
                cases[f"kvps, {case}", name] = Counter(hosts, stack.enter_context(running))
        if has_torch():
            cases[_GLOO] = Counter(hosts, stack.enter_context(_all_reduce(hosts[:-1], nbytes, rounds)))
        times = in_turns(cases, turns)
    return {key: (each, cases[key].figures()) for key, each in times.items()}


def _row(measured: Measured, key: Key) -> Row:
    settings: Figures = {
        "gbit": measured.gbit,
        "workers": measured.workers,
        "mb": measured.nbytes / 1e6,
        "layout": key[1],
    }
    if key not in measured.cases:
        return Row(key[0], "tcp", settings, why=measured.why or NOT_INSTALLED)
    times, counted = measured.cases[key]
    least_in, least_out = _least(key, measured.workers, measured.nbytes)
    more = {
        "in_mb": counted["in_mb"],
        "least_in_mb": round(least_in / 1e6, 1),
        "out_mb": counted["out_mb"],
        "least_out_mb": round(least_out / 1e6, 1),
    }
    if ratio := measured.over_gloo(key):
        more["over_gloo"] = round(ratio.median, 3)
    return Row(key[0], "tcp", settings, times, more)


def _least(key: Key, workers: int, nbytes: int) -> tuple[float, float]:
    if key == _GLOO:
        ring = 2 * (workers - 1) / workers * nbytes
        return ring, ring
    setting, items = _setting(key), nbytes // DTYPE.itemsize
    sizes = [float(format_of(name).nbytes(items)) for name in (setting.gradient_format, setting.weight_format)]
    return LAYOUTS[key[1]].least(workers, *sizes)


def _bar(measured: Measured, key: Key) -> Bar:
    case, layout = key
    limit = _setting(key).limit if LAYOUTS[layout].limits else None
    setting = f"{measured.gbit:g} Gbit/s, {measured.nbytes / 1e6:g} MB, {measured.workers} workers, {layout}"
    return Bar(_BAR, f"{setting}: {case} over {GLOO}", True, limit, measured.over_gloo(key), measured.why)


def _setting(key: Key) -> Setting:
    return SETTINGS[key[0].removeprefix("kvps, ")]
