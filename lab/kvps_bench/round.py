"""`kvps_bench round`: one BSP round of all workers, against bare sockets that carry the same bytes to the same server.

In a round every worker pushes a gradient, the aggregator averages and steps, and every worker gets the new weights.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from kvps_cli.output import say

from kvps.arrays.layout import DTYPE
from kvps_bench.bare import Socket
from kvps_bench.crew import Lab, Member, Place, crew, spawning, together
from kvps_bench.result import Bar, Figures, Row
from kvps_bench.roles import LR, Aggregator, Worker, model, temporary_job
from kvps_bench.turns import Case, Times, in_turns

VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "kvps": {},
    "kvps, bf16": {"gradient_format": "bf16", "weight_format": "bf16"},
}
"""Case -> the settings of its job."""
SHARED: Mapping[str, Mapping[str, Any]] = {"kvps": {}, "kvps, in its buffers": {"lent": True}}
"""The cases over shared memory."""
_BARE = "bare sockets"
_BAR, _MOST_RATIO = 2, 1.2
_TURN_BYTES = 1e9  # of one worker's gradients in a turn: long enough that events of once a second get their due share
_MOST_ROUNDS = 200
NOTES = (
    "Bare sockets carry the same bytes in the same chunks, under fresh names in each round, and unlink old ones, as "
    "every system must that never shows half of an array. kvps overlaps what they do one after another. bf16 has half "
    "the bytes; shm is shared memory.",
)


@dataclass(frozen=True)
class Setting:
    """One size of a round."""

    nbytes: int
    workers: int

    def rounds(self, quick: bool) -> int:
        """Return how many rounds make a turn: enough that turns of small rounds outlast disturbances."""
        rounds = max(3, min(_MOST_ROUNDS, int(_TURN_BYTES / self.nbytes)))
        return max(2, rounds // 10) if quick else rounds

    def figures(self) -> Figures:
        return {"mb": self.nbytes / 1e6, "workers": self.workers}


class BareWorker:
    """A worker that SETs its gradient and GETs the weights."""

    def __init__(self, url: str, prefix: str, nbytes: int, rank: int, barrier: Any) -> None:
        self._socket, self._prefix, self._rank, self._barrier = Socket(url), prefix, rank, barrier
        self._gradient = np.full(nbytes // DTYPE.itemsize, rank + 1, DTYPE)
        self._weights = np.zeros_like(self._gradient)
        self._round = 0

    def rounds(self, number: int) -> list[float]:
        """Return the seconds of each of `number` rounds."""
        took = []
        self._barrier.wait()
        for _ in range(number):
            began = time.perf_counter()
            self._socket.set(f"{self._prefix}:g{self._rank}:{self._round}", self._gradient)
            self._barrier.wait()
            self._barrier.wait()
            self._socket.get(f"{self._prefix}:w:{self._round}", self._weights)
            took.append(time.perf_counter() - began)
            self._round += 1
        return took

    def close(self) -> None:
        self._socket.close()


class BareAggregator:
    """An aggregator that GETs every gradient and SETs the weights. It unlinks used gradients, and weights that are two
    rounds old, as kvps does."""

    def __init__(self, url: str, prefix: str, nbytes: int, workers: int, barrier: Any) -> None:
        self._socket, self._prefix, self._workers, self._barrier = Socket(url), prefix, workers, barrier
        self._array = np.zeros(nbytes // DTYPE.itemsize, DTYPE)
        self._round = 0

    def rounds(self, number: int) -> list[float]:
        """Serve `number` rounds."""
        self._barrier.wait()
        for _ in range(number):
            self._barrier.wait()
            for rank in range(self._workers):
                self._socket.get(f"{self._prefix}:g{rank}:{self._round}", self._array)
            self._socket.set(f"{self._prefix}:w:{self._round}", self._array)
            self._barrier.wait()
            for rank in range(self._workers):
                self._socket.unlink(f"{self._prefix}:g{rank}:{self._round}", self._array)
            self._unlink(self._round - 2)
            self._round += 1
        return []

    def clear(self) -> None:
        """Delete all that is still stored."""
        self._unlink(self._round - 2)
        self._unlink(self._round - 1)

    def _unlink(self, round_: int) -> None:
        if round_ >= 0:
            self._socket.unlink(f"{self._prefix}:w:{round_}", self._array)

    def close(self) -> None:
        self._socket.close()


@contextmanager
def bare(url: str, setting: Setting, rounds: int) -> Iterator[Case]:
    """Yield a case of bare rounds."""
    barrier, prefix = spawning.Barrier(setting.workers + 1), f"bench-{secrets.token_hex(4)}"
    makers = [(BareWorker, url, prefix, setting.nbytes, rank, barrier) for rank in range(setting.workers)]
    with crew(*makers, (BareAggregator, url, prefix, setting.nbytes, setting.workers, barrier)) as members:
        yield _case(members, rounds)
        members[-1]("clear")


@contextmanager
def kvps(
    place: Place, transport: str, setting: Setting, rounds: int, lent: bool = False, **settings: Any
) -> Iterator[Case]:
    """Yield a case of a job's rounds. At the end the weights are checked: what was measured did the work."""
    url = place.urls[transport]
    with temporary_job(place, transport, model(setting.nbytes), workers=setting.workers, **settings) as job:
        makers = [(Worker, url, job.name, rank, lent) for rank in range(setting.workers)]
        with crew((Aggregator, url, job.name), *makers) as (_, *members):
            yield _case(members, rounds)
            near = 2.0**-8 if settings.get("weight_format") == "bf16" else 0.0  # bf16 keeps 8 bits
            check_weights(together(members, "weights"), setting.workers, near)


def _case(members: list[Member], rounds: int) -> Case:
    """Return a case in which all members do rounds, with the seconds of the first member."""
    return lambda: together(members, "rounds", rounds)[0]


def check_weights(weights: Iterable[tuple[int, float, float]], workers: int, near: float = 0.0) -> None:
    """Assert that the (version, least, greatest) weight of each worker is what its versions make, within `near`."""
    for version, least, greatest in weights:
        wanted = -version * LR * (workers + 1) / 2
        assert least == greatest, (version, least, greatest)
        assert abs(greatest - wanted) <= near * abs(wanted), (version, greatest, wanted)


def measure(lab: Lab, settings: Sequence[Setting]) -> Iterator[Row | Bar]:
    """Measure rounds of each setting over each transport."""
    for setting in settings:
        say(f"{setting.nbytes / 1e6:g} MB, {setting.workers} workers")
        measured = _measured(lab, setting)
        for (case, transport), times in measured.items():
            base = measured.get((_BARE, transport), measured.get((_BARE, lab.transports[0])))
            more = {"over_bare": round(times.over(base).median, 3)} if base else {}
            yield Row(case, transport, setting.figures(), times, more)
        yield from _bars(setting, measured)


def _measured(lab: Lab, setting: Setting) -> dict[tuple[str, str], Times]:
    """Return the times of each case over each transport."""
    rounds = setting.rounds(lab.quick)
    cases: dict[tuple[str, str], Case] = {}
    with ExitStack() as stack:
        for transport in lab.transports:
            shared = transport == "shm"
            if not shared:
                cases[_BARE, transport] = stack.enter_context(bare(lab.place.urls[transport], setting, rounds))
            for name, more in (SHARED if shared else VARIANTS).items():
                cases[name, transport] = stack.enter_context(kvps(lab.place, transport, setting, rounds, **more))
        return in_turns(cases, lab.turns)


def _bars(setting: Setting, measured: Mapping[tuple[str, str], Times]) -> Iterator[Bar]:
    if setting.nbytes < 4_000_000:
        return
    for case, transport in measured:
        if case == _BARE:
            ratio = measured["kvps", transport].over(measured[case, transport])
            what = f"{setting.nbytes / 1e6:g} MB, {setting.workers} workers: kvps over {case}, {transport}"
            yield Bar(_BAR, what, True, _MOST_RATIO, ratio)
