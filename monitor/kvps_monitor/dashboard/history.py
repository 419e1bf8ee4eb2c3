"""What the charts of a job show: series of the whole run, by version, that grow while somebody looks."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvps.history.evaluations import Evaluation
from kvps_monitor.spans import Iteration, VersionFigures, mean

MOST = 1200
"""How many points of a series are kept: more than a chart has pixels."""
_NAMES = ("made", "loss", "norm", "lr", "rate", "staleness", "traffic")
_OVER_S = 2.0  # a rate is that of so long a time, if there are versions so close


class Point(NamedTuple):
    """One point of a series, and the number of the look that made or changed it last."""

    look: int
    x: float
    values: tuple[float | None, ...]


class Series:
    """Points in the order of x. When there are more than `MOST`, every second one of the older half is dropped.

    rewritten  the look that dropped points last: whoever has seen less needs all of them
    """

    def __init__(self) -> None:
        self._points: dict[float, Point] = {}
        self.rewritten = 0

    def put(self, look: int, x: float, values: Sequence[float | None]) -> None:
        """Add a point, or change the one that is there."""
        old, new = self._points.get(x), tuple(values)
        if old is None or old.values != new:
            self._points[x] = Point(look, x, new)
        if len(self._points) > MOST:
            ordered = sorted(self._points)
            for x in ordered[1 : MOST // 2 : 2]:
                del self._points[x]
            self.rewritten = look

    def points(self) -> list[Point]:
        """Return the points by x."""
        return sorted(self._points.values(), key=lambda point: point.x)


class Snapshot(NamedTuple):
    """A series as it was after a look."""

    rewritten: int
    points: list[Point]


class History:
    """The series of one job, each by version. Used by one thread.

    made         when it was made, in ms since the first one that is known, and how many contributions had come with it
    loss         mean, lowest and highest of the workers' newest losses, of the weights before it
    norm, lr     the norm of the reduced gradient; the learning rate
    rate         versions a second, contributions a second, of the last seconds before it
    staleness    mean and highest of its contributions
    traffic      bytes a second that aggregators receive, and that they store
    eval.<name>  a figure that was reported of it
    """

    def __init__(self) -> None:
        self._series = defaultdict[str, Series](Series, {name: Series() for name in _NAMES})
        self._losses: dict[str, float] = {}  # worker -> its newest loss
        self._rounds: dict[str, int] = {}  # worker -> its round
        self._foremost = 0  # the last version whose weights any worker has a loss of
        self._losses_from = 0  # the version from which on losses are those of iterations
        self._first_us = 0.0
        self._before = deque[VersionFigures]()  # the versions over which the next rate is

    def add(
        self,
        look: int,
        versions: Iterable[VersionFigures],
        iterations: Sequence[Sequence[Iteration]] = (),
        evaluations: Iterable[Evaluation] = (),
        losses: Iterable[tuple[int, float, float, float]] = (),
    ) -> None:
        """Add what a look has seen, oldest first; what was added before is left out. `losses` are those of the whole
        run, (version, mean, lowest, highest): they are shown where a worker's iterations are not there any more."""
        if whole_run := list(losses):
            firsts = (each[0].version + 1 for each in iterations if each)
            self._losses_from = max(firsts, default=whole_run[-1][0] + 1)
        for version, *values in whole_run:
            if version < self._losses_from:
                self._series["loss"].put(look, version, values)
        recorded = sorted((i for each in iterations for i in each if i.loss is not None), key=_recorded_us)
        self._add_losses(look, recorded)
        for figures in versions:
            if not self._before or figures.version > self._before[-1].version:
                self._add_version(look, figures)
        for e in evaluations:
            for name, value in e.figures.items():
                self._series[f"eval.{name}"].put(look, e.version, (value if math.isfinite(value) else None,))

    def snapshot(self) -> dict[str, Snapshot]:
        """Return all series as they are now."""
        return {name: Snapshot(series.rewritten, series.points()) for name, series in self._series.items()}

    def _add_version(self, look: int, v: VersionFigures) -> None:
        def put(name: str, *values: float | None) -> None:
            self._series[name].put(look, v.version, values)

        self._first_us = self._first_us or v.at_us
        put("made", round((v.at_us - self._first_us) / 1000), v.progress + v.contributions)
        put("norm", v.norm)
        if v.contributions and v.lr is not None:
            put("lr", v.lr)
        put("staleness", v.late / v.contributions if v.contributions else 0.0, float(v.latest))
        while len(self._before) > 1 and self._before[1].at_us <= v.at_us - 1e6 * _OVER_S:
            self._before.popleft()
        if self._before and (passed := (v.at_us - self._before[0].at_us) / 1e6) > 0:
            made = (v.version - self._before[0].version) / passed
            counted = v.progress + v.contributions - self._before[0].progress - self._before[0].contributions
            put("rate", made, max(0, counted) / passed)
            put("traffic", made * v.received, made * v.stored)
        self._before.append(v)

    def _add_losses(self, look: int, iterations: Iterable[Iteration]) -> None:
        """Make points of losses. One that is no number takes its worker out of the mean, as no chart has a place for
        it."""
        for i in iterations:
            if i.round <= self._rounds.get(i.worker, -1):
                continue
            if i.version + 1 > self._foremost:
                self._put_loss(look)
                self._foremost = i.version + 1
            self._rounds[i.worker] = i.round
            self._losses.pop(i.worker, None)
            if i.loss is not None and math.isfinite(i.loss):
                self._losses[i.worker] = i.loss
        self._put_loss(look)

    def _put_loss(self, look: int) -> None:
        losses = list(self._losses.values())
        if losses and self._foremost >= self._losses_from:
            self._series["loss"].put(look, self._foremost, (mean(losses), min(losses), max(losses)))


def _recorded_us(i: Iteration) -> float:
    """Return when an iteration ended; of one without times, when it was told, up to a tenth of a second later."""
    return i.ended_us if i.at_us else 1000 * int(i.entry.partition("-")[0])
