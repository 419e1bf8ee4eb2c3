"""`kvps_bench spans`: what a BSP round costs with spans recorded, over one without.

One job has all turns, and its processes are told whether to record: two jobs differ by more than spans cost, by where
their arrays lie. A third case is the same as the second: how far those two are apart is what the machine adds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from kvps.connection.server_clock import ServerClock
from kvps_bench.crew import Member, Place, crew, together
from kvps_bench.result import Bar, Result, Row, machine
from kvps_bench.roles import Aggregator, Worker, model, temporary_job
from kvps_bench.round import Setting
from kvps_bench.turns import Case, Times, in_turns

_MOST_RATIO = 1.02
_CASES = {"with spans": True, "without": False, "without, again": False}


class Recorder(Worker):
    """A worker that records spans or does not, from round to round."""

    def record(self, on: bool) -> None:
        """Record spans from now on, or do not."""
        timer = self._session._timer
        self._clock = timer.clock or self._clock
        timer.clock = self._clock if on else None

    _clock: ServerClock | None = None


class RecordingAggregator(Aggregator):
    """An aggregator that records spans or does not."""

    def record(self, on: bool) -> None:
        """Record spans from now on, or do not."""
        assert self.serving
        for spans in self.serving.held.traces._spans.values():
            self._clock = spans._clock or self._clock
            spans._clock = self._clock if on else None

    _clock: ServerClock | None = None


def measure(
    place: Place,
    transports: Sequence[str],
    settings: Sequence[Setting],
    turns: int,
    quick: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> Result:
    """Measure rounds of jobs with and without spans, for each size over each transport."""
    rows: list[Row] = []
    bars: list[Bar] = []
    for setting in settings:
        for transport in transports:
            say(f"spans, {setting.nbytes / 1e6:g} MB, {transport}")
            times = _measured(place, transport, setting, turns, quick)
            rows += [
                Row(case, transport, setting.figures(), times[case], {"spans": "on" if _CASES[case] else "off"})
                for case in _CASES
            ]
            about = f"{setting.nbytes / 1e6:g} MB, {transport}"
            ratio = times["with spans"].over(times["without"])
            bars.append(Bar(16, f"a round with spans over one without, {about}", True, _MOST_RATIO, ratio))
            same = times["without, again"].over(times["without"])
            bars.append(Bar(16, f"a round without over one without, {about}", True, None, same))
    return Result("spans", turns, rows, bars, machine(place.store.client), _NOTES)


_NOTES = ("The same processes have all turns. The last two cases are the same: their ratio is what the machine adds.",)


def _measured(place: Place, transport: str, setting: Setting, turns: int, quick: bool) -> dict[str, Times]:
    url, rounds = place.urls[transport], setting.rounds(quick)
    with temporary_job(place, transport, model(setting.nbytes), workers=setting.workers) as job:
        workers = [(Recorder, url, job.name, rank) for rank in range(setting.workers)]
        with crew((RecordingAggregator, url, job.name), *workers) as (aggregator, *members):
            together(members, "rounds", 2)  # the aggregator holds its shards then
            cases: dict[str, Case] = {
                case: partial(_rounds, [aggregator, *members], members, rounds, on) for case, on in _CASES.items()
            }
            return in_turns(cases, turns)


def _rounds(everybody: list[Member], workers: list[Member], rounds: int, on: bool) -> list[float]:
    """Return the seconds of each round of the first worker: in BSP they are those of all."""
    together(everybody, "record", on)
    return list(together(workers, "rounds", rounds)[0])
