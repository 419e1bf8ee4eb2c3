"""`kvps_bench units`: what rounds of units cost, over a static partition, where all workers are equally fast.

Both jobs make a version of as many gradients as there are workers. With rounds of units each worker asks for its unit
first, and may do two of a round while another worker does none.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
from kvps_cli.output import say

from kvps.arrays.layout import DTYPE
from kvps_bench.crew import Lab, Member, crew, together
from kvps_bench.result import Bar, Row
from kvps_bench.roles import Aggregator, Worker, model, temporary_job
from kvps_bench.round import Setting, check_weights
from kvps_bench.turns import Case, Times, in_turns

_BAR, _MOST_RATIO = 20, 1.1
_UNITS = 2**40  # no run comes to their end
_STATIC, _IN_UNITS = "static partition", "rounds of units"
NOTES = (
    "The jobs take turns, each with its own aggregator and workers. A round has one unit for each worker, so both "
    "carry the same bytes. One time is that of all rounds of a turn, over their number.",
    "At the end the weights are checked: each gradient was applied once.",
)


class RoundWorker(Worker):
    """A worker with one gradient a round."""

    def mean_round(self, number: int) -> list[float]:
        """Return the mean seconds of `number` rounds."""
        began = time.perf_counter()
        self.rounds(number)
        return [(time.perf_counter() - began) / number]


class UnitWorker(Worker):
    """A worker that takes units. The gradient of the k-th unit of a round is the constant k + 1."""

    def __init__(self, url: str, job: str, rank: int) -> None:
        super().__init__(url, job, rank)
        opened = self.store.job(job)
        rounds = opened.config.unit_rounds
        assert rounds
        self._per_round, shapes = rounds.per_round, {p.name: p.shape for p in opened.layout.parameters}
        self._by_place = [
            {name: np.full(shape, k + 1, DTYPE) for name, shape in shapes.items()} for k in range(rounds.per_round)
        ]
        self._last = 0

    def mean_round(self, number: int) -> list[float]:
        """Do units until `number` more versions are made. Return the mean seconds of a version. The worker ends with a
        unit of the next round, which it does first in the next turn."""
        self._last += number
        began = time.perf_counter()
        while True:
            unit = self._session.next_unit()
            assert unit is not None
            self._session.pull()
            if self._session.version >= self._last:
                return [(time.perf_counter() - began) / number]
            self._session.push(self._by_place[unit % self._per_round])


_WORKERS: Mapping[str, type[Worker]] = {_STATIC: RoundWorker, _IN_UNITS: UnitWorker}


def measure(lab: Lab, settings: Sequence[Setting]) -> Iterator[Row | Bar]:
    """Measure rounds of both jobs, for each size over each transport."""
    for setting in settings:
        for transport in lab.transports:
            about = f"{setting.nbytes / 1e6:g} MB, {setting.workers} workers, {transport}"
            say(f"units, {about}")
            times = _measured(lab, transport, setting)
            for case in _WORKERS:
                yield Row(case, transport, setting.figures(), times[case])
            ratio = times[_IN_UNITS].over(times[_STATIC])
            yield Bar(_BAR, f"{_IN_UNITS} over a {_STATIC}, {about}", True, _MOST_RATIO, ratio)


def _measured(lab: Lab, transport: str, setting: Setting) -> dict[str, Times]:
    url, rounds = lab.place.urls[transport], setting.rounds(lab.quick)
    crews: dict[str, list[Member]] = {}
    with ExitStack() as stack:
        for case, worker in _WORKERS.items():
            settings: dict[str, Any] = {"workers": setting.workers}
            if worker is UnitWorker:
                settings |= {"units": _UNITS // setting.workers * setting.workers, "units_per_round": setting.workers}
            job = stack.enter_context(temporary_job(lab.place, transport, model(setting.nbytes), **settings))
            makers = [(worker, url, job.name, rank) for rank in range(setting.workers)]
            _, *crews[case] = stack.enter_context(crew((Aggregator, url, job.name), *makers))
        cases: dict[str, Case] = {case: partial(_turn, members, rounds) for case, members in crews.items()}
        times = in_turns(cases, lab.turns)
        for members in crews.values():
            check_weights(together(members, "weights"), setting.workers)
        return times


def _turn(workers: list[Member], rounds: int) -> list[float]:
    """Return the mean seconds of a round of the slowest worker."""
    return [max(seconds for (seconds,) in together(workers, "mean_round", rounds))]
