"""`kvps_bench round`: one BSP round of all workers, against bare sockets that carry the same bytes to the same server.

In a round every worker pushes a gradient, the aggregator averages and steps, and every worker gets the new weights.
Rounds of PyTorch's all-reduce over gloo take turns with these, where it is installed.
"""

from __future__ import annotations

import importlib.util
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvps.arrays.layout import DTYPE
from kvps.optim import SGD, Optimizer
from kvps_bench.bare import Socket
from kvps_bench.crew import Member, Place, crew, free_port, spawning, together
from kvps_bench.result import NOT_INSTALLED, Bar, Figures, Result, Row, machine
from kvps_bench.roles import LR, Aggregator, Worker, model, temporary_job
from kvps_bench.turns import Case, Times, in_turns

VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "kvps": {},
    "kvps, bf16": {"gradient_format": "bf16", "weight_format": "bf16"},
}
"""Case -> the settings of its job."""
LENT = "kvps, in its buffers"
SHARED: Mapping[str, Mapping[str, Any]] = {"kvps": {}, LENT: {"lent": True}}
"""The cases over shared memory."""

GLOO = "gloo all_reduce"
NEAR_GLOO = 1e-3
"""How far, relatively, the weights of the all-reduce may be from exact ones: they are sums of rounded numbers."""
_BARE, _FRESH, _HALF = "bare sockets", "bare sockets, fresh names", "bare sockets, half the bytes"
_BARES: Mapping[str, Mapping[str, Any]] = {_BARE: {}, _FRESH: {"fresh": True}, _HALF: {"part": 2}}
_TURN_BYTES = 1e9  # of one worker's gradients in a turn: long enough that events of once a second get their due share
_MOST_ROUNDS = 200


@dataclass(frozen=True)
class Setting:
    """One size of a round."""

    nbytes: int
    workers: int
    tensors: int = 1
    optimizer: Optimizer = field(default_factory=lambda: SGD(lr=LR))

    def rounds(self, quick: bool) -> int:
        """Return how many rounds make a turn: enough that turns of small rounds outlast disturbances."""
        rounds = max(3, min(_MOST_ROUNDS, int(_TURN_BYTES / self.nbytes)))
        return max(2, rounds // 10) if quick else rounds

    def figures(self) -> Figures:
        return {
            "mb": self.nbytes / 1e6,
            "workers": self.workers,
            "tensors": self.tensors,
            "optimizer": self.optimizer.kind,
        }


class BareWorker:
    """A worker that SETs its gradient and GETs the weights."""

    def __init__(self, url: str, prefix: str, fresh: bool, nbytes: int, rank: int, barrier: Any) -> None:
        self._socket, self._names, self._rank, self._barrier = Socket(url), Names(prefix, fresh), rank, barrier
        self._gradient = np.full(nbytes // DTYPE.itemsize, rank + 1, DTYPE)
        self._weights = np.zeros_like(self._gradient)

    def rounds(self, number: int) -> list[float]:
        """Return the seconds of each of `number` rounds."""
        took = []
        self._barrier.wait()
        for _ in range(number):
            began = time.perf_counter()
            self._socket.set(self._names.gradient(self._rank), self._gradient)
            self._barrier.wait()
            self._barrier.wait()
            self._socket.get(self._names.weights(), self._weights)
            took.append(time.perf_counter() - began)
            self._names.round += 1
        return took

    def close(self) -> None:
        self._socket.close()


class BareAggregator:
    """An aggregator that GETs every gradient and SETs the weights. With fresh names it unlinks used gradients, and
    weights that are two rounds old, as kvps does."""

    def __init__(self, url: str, prefix: str, fresh: bool, nbytes: int, workers: int, barrier: Any) -> None:
        self._socket, self._names, self._workers, self._barrier = Socket(url), Names(prefix, fresh), workers, barrier
        self._fresh = fresh
        self._array = np.zeros(nbytes // DTYPE.itemsize, DTYPE)

    def rounds(self, number: int) -> list[float]:
        """Serve `number` rounds."""
        self._barrier.wait()
        for _ in range(number):
            self._barrier.wait()
            for rank in range(self._workers):
                self._socket.get(self._names.gradient(rank), self._array)
            self._socket.set(self._names.weights(), self._array)
            self._barrier.wait()
            if self._fresh:
                self._free(self._names.round)
            self._names.round += 1
        return []

    def _free(self, round_: int) -> None:
        for rank in range(self._workers):
            self._socket.unlink(self._names.gradient(rank, round_), self._array)
        if round_ >= 2:
            self._socket.unlink(self._names.weights(round_ - 2), self._array)

    def clear(self) -> None:
        """Delete all that is still stored."""
        last = self._names.round - 1
        if last < 0:
            return
        if not self._fresh:
            for rank in range(self._workers):
                self._socket.unlink(self._names.gradient(rank), self._array)
        for round_ in {max(0, last - 1), last} if self._fresh else {0}:
            self._socket.unlink(self._names.weights(round_), self._array)

    def close(self) -> None:
        self._socket.close()


class Names:
    """The key names of bare sockets: always the same, or fresh ones in each round."""

    def __init__(self, prefix: str, fresh: bool) -> None:
        self._prefix, self._fresh = prefix, fresh
        self.round = 0

    def gradient(self, rank: int, round_: int | None = None) -> str:
        return f"{self._prefix}:g{rank}{self._number(round_)}"

    def weights(self, round_: int | None = None) -> str:
        return f"{self._prefix}:w{self._number(round_)}"

    def _number(self, round_: int | None) -> str:
        return f":{self.round if round_ is None else round_}" if self._fresh else ""


@contextmanager
def bare(url: str, setting: Setting, rounds: int, fresh: bool = False, part: int = 1) -> Iterator[Case]:
    """Yield a case of bare rounds that carry 1/`part` of the bytes."""
    barrier, prefix = spawning.Barrier(setting.workers + 1), f"bench-{secrets.token_hex(4)}"
    common = (url, prefix, fresh, setting.nbytes // part)
    makers = [(BareWorker, *common, rank, barrier) for rank in range(setting.workers)]
    with crew(*makers, (BareAggregator, *common, setting.workers, barrier)) as members:
        yield _case(members, rounds)
        members[-1]("clear")


@contextmanager
def kvps(
    place: Place, transport: str, setting: Setting, rounds: int, lent: bool = False, **settings: Any
) -> Iterator[Case]:
    """Yield a case of a job's rounds. At the end the weights are checked: what was measured did the work."""
    url = place.urls[transport]
    settings = {"workers": setting.workers, "optimizer": setting.optimizer, **settings}
    with temporary_job(place, transport, model(setting.nbytes, setting.tensors), **settings) as job:
        makers = [(Worker, url, job.name, rank, lent) for rank in range(setting.workers)]
        with crew((Aggregator, url, job.name), *makers) as (_, *members):
            yield _case(members, rounds)
            if isinstance(setting.optimizer, SGD):
                near = 2.0**-8 if settings.get("weight_format") == "bf16" else 0.0  # bf16 keeps 8 bits
                check_weights(together(members, "weights"), setting.optimizer, setting.workers, near)


def _case(members: list[Member], rounds: int) -> Case:
    """Return a case in which all members do rounds, with the seconds of the first member."""
    return lambda: together(members, "rounds", rounds)[0]


def check_weights(weights: Iterable[tuple[int, float, float]], optimizer: SGD, workers: int, near: float) -> None:
    """Assert that the (version, least, greatest) weight of each worker is what its versions make, within `near`."""
    assert isinstance(optimizer.lr, float)
    for version, least, greatest in weights:
        wanted = -version * optimizer.lr * (workers + 1) / 2
        assert least == greatest, (version, least, greatest)
        assert abs(greatest - wanted) <= near * abs(wanted), (version, greatest, wanted)


@contextmanager
def all_reduce(setting: Setting, rounds: int) -> Iterator[Case]:
    """Yield a case of rounds of gloo's all-reduce, whose weights are checked at the end."""
    from kvps_bench.gloo import GlooWorker  # PyTorch is an extra

    where = ("127.0.0.1", free_port(), "lo")
    ranks = [(rank, setting.workers) for rank in range(setting.workers)]
    with crew(*((GlooWorker, setting.nbytes, setting.tensors, each, *where) for each in ranks)) as members:
        yield _case(members, rounds)
        check_weights(together(members, "weights"), SGD(lr=LR), setting.workers, NEAR_GLOO)


def has_torch() -> bool:
    """Return whether this Python has PyTorch."""
    return importlib.util.find_spec("torch") is not None


def measure(
    place: Place,
    transports: Sequence[str],
    settings: Sequence[Setting],
    turns: int,
    quick: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> Result:
    """Measure rounds of each setting over each transport, and gloo's all-reduce if PyTorch is installed."""
    rows: list[Row] = []
    bars: list[Bar] = []
    for setting in settings:
        say(f"{setting.nbytes / 1e6:g} MB, {setting.workers} workers")
        measured = _measured(place, transports, setting, turns, quick)
        rows += _rows(setting, transports, measured)
        bars += _bars(setting, transports, measured)
    return Result("round", turns, rows, bars, machine(place.store.client), _NOTES)


_NOTES = (
    "Bare sockets carry the same bytes in the same chunks, without overlap. With fresh names they also unlink old "
    "ones, as every system must that never shows half of an array. kvps overlaps what bare sockets do one after "
    "another. bf16 has half the bytes.",
    "gloo's all-reduce takes its turns in the same run, over TCP; shm is shared memory.",
)
Key = tuple[str, str]
"""Case and transport."""
_ALL_REDUCE: Key = (GLOO, "tcp")


def _measured(place: Place, transports: Sequence[str], setting: Setting, turns: int, quick: bool) -> dict[Key, Times]:
    rounds = setting.rounds(quick)
    cases: dict[Key, Case] = {}
    with ExitStack() as stack:
        for transport in transports:
            url = place.urls[transport]
            shared = transport == "shm"
            for name, more in {} if shared else _BARES.items():
                cases[name, transport] = stack.enter_context(bare(url, setting, rounds, **more))
            for name, more in (SHARED if shared else VARIANTS).items():
                cases[name, transport] = stack.enter_context(kvps(place, transport, setting, rounds, **more))
        if has_torch():
            cases[_ALL_REDUCE] = stack.enter_context(all_reduce(setting, rounds))
        return in_turns(cases, turns)


def _rows(setting: Setting, transports: Sequence[str], measured: Mapping[Key, Times]) -> list[Row]:
    keys = [
        (name, transport)
        for transport in transports
        for name in (SHARED if transport == "shm" else (*_BARES, *VARIANTS))
    ]
    rows = []
    for key in [*keys, _ALL_REDUCE]:
        times = measured.get(key)
        more: Figures = {}
        if times and (base := measured.get((_BARE, key[1] if key in keys else transports[0]))):
            more = {"over_bare": round(times.over(base).median, 3)}
        rows.append(Row(*key, setting.figures(), times, more, "" if times else NOT_INSTALLED))
    return rows


def _bars(setting: Setting, transports: Sequence[str], measured: Mapping[Key, Times]) -> list[Bar]:
    if setting.tensors > 1 or not isinstance(setting.optimizer, SGD) or setting.nbytes < 4_000_000:
        return []
    where = f"{setting.nbytes / 1e6:g} MB, {setting.workers} workers"

    def bar(number: int, mine: Key, limit: float, other: Key) -> Bar:
        ratio = measured[mine].over(measured[other]) if mine in measured and other in measured else None
        return Bar(number, f"{where}: {' '.join(mine)} over {' '.join(other)}", True, limit, ratio)

    carried = [transport for transport in transports if transport != "shm"]
    bars = [bar(2, ("kvps", t), 1.2, (base, t)) for t in carried for base in (_BARE, _FRESH)]
    bars += [bar(4, ("kvps, bf16", t), 1.1, _ALL_REDUCE) for t in carried]
    if "shm" in transports:
        bars += [bar(5, (name, "shm"), 0.5, _ALL_REDUCE) for name in SHARED]
    return bars
