"""What a chart shows of a job: points that grow while somebody looks, each a value of x and numbers."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from operator import itemgetter
from typing import NamedTuple, TypeVar

from kvps.history.events import Event
from kvps_monitor.job_now import FINISHED
from kvps_monitor.spans import GradientNorms, Iteration, ShardVersion, mean
from kvps_monitor.views import JobView

MOST = 1200
"""How many points of a series are kept: more than a chart has pixels."""
_UNTOLD_S = 2.0  # what is recorded comes with a later push
_BINS, _SHORTEST_S = 60, 0.1  # parts of the time before the first look, and how long one is at least
T = TypeVar("T")


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
    """The series of one job. Used by one thread.

    loss     by the round of the foremost worker: mean, lowest and highest of the workers' newest losses
    norm     by version: the norm of the reduced gradient
    rate     by seconds: versions a second, contributions a second
    lag      by seconds: mean and highest staleness of the workers' last contributions, and the backlog
    traffic  by seconds: bytes a second that workers pull, and that they push
    """

    def __init__(self) -> None:
        self._series = {name: Series() for name in ("loss", "norm", "rate", "lag", "traffic")}
        self._losses: dict[str, float] = {}  # worker -> its newest loss
        self._rounds: dict[str, int] = {}  # worker -> its round
        self._foremost = 0  # the last round of any worker
        self._counted: deque[tuple[int, int]] = deque(maxlen=8)  # (ms, contributions) of the last looks

    def begin(
        self,
        look: int,
        iterations: Sequence[Sequence[Iteration]],
        versions: Sequence[Sequence[ShardVersion]],
        commits: Iterable[Event],
        now_s: float,
        losses: Sequence[tuple[int, float, float, float]],
    ) -> None:
        """Add what was recorded before the first look, which is at `now_s`, or for a finished job at its end. `commits`
        are the newest of the log, and `losses` those of the whole run: (round, mean, lowest, highest)."""
        first = min((each[0].round for each in iterations if each), default=math.inf)
        for round_, *values in losses:
            if round_ < first:
                self._series["loss"].put(look, round_, values)
        recorded = sorted(chain.from_iterable(iterations), key=_recorded_us)
        self._add_losses(look, ((i.round, i.worker, i.loss) for i in recorded if i.loss is not None))
        norms = GradientNorms(len(versions))
        for version, norm in chain.from_iterable(map(norms.add, versions)):
            self._series["norm"].put(look, version, (norm,))
        made = [(v.at_us / 1e6, (1, v.contributions)) for v in (versions[0] if versions else ())]
        moved = [(i.at_us / 1e6, (i.pulled, i.pushed)) for each in iterations for i in each if i.at_us]
        for name, entries in (("rate", made), ("traffic", moved)):
            for at_s, width, counts in _bins(entries, now_s):
                self._series[name].put(look, at_s, [sum(pair[n] for pair in counts) / width for n in (0, 1)])
        committed = [(e.at_ms / 1000, c["staleness"]) for e in commits for c in e.facts["contributions"]]
        for at_s, _, late in _bins(committed, now_s):
            if late:
                self._series["lag"].put(look, at_s, (mean(late), float(max(late)), None))

    def add(self, look: int, view: JobView) -> None:
        """Add what a look has seen."""
        losses = [(round_, w.worker, loss) for w in view.workers for round_, loss in w.losses]
        self._add_losses(look, sorted(losses, key=itemgetter(0)))
        for version, norm in view.gradient_norms:
            self._series["norm"].put(look, version, (norm,))
        if view.state == FINISHED:  # nothing moves any more, and its charts end with it
            return
        at_s = round(view.at_ms / 1000, 1)
        self._series["rate"].put(look, at_s, (view.commits_per_s, self._contributions_per_s(view)))
        late = [w.staleness for w in view.workers if w.staleness is not None]
        middle, most = (mean(late), float(max(late))) if late else (None, None)
        self._series["lag"].put(look, at_s, (middle, most, float(view.backlog)))
        pulled, pushed = (sum(getattr(w, n) for w in view.workers) for n in ("pulled_per_s", "pushed_per_s"))
        self._series["traffic"].put(look, at_s, (pulled, pushed))

    def snapshot(self) -> dict[str, Snapshot]:
        """Return all series as they are now."""
        return {name: Snapshot(series.rewritten, series.points()) for name, series in self._series.items()}

    def _add_losses(self, look: int, losses: Iterable[tuple[int, str, float | None]]) -> None:
        """Make points of (round, worker, loss). A loss that is no number takes its worker out of the mean: a chart
        has no place for it."""
        for round_, worker, loss in losses:
            if round_ <= self._rounds.get(worker, -1):
                continue
            if round_ > self._foremost:
                self._put_loss(look)
                self._foremost = round_
            self._rounds[worker] = round_
            self._losses.pop(worker, None)
            if loss is not None and math.isfinite(loss):
                self._losses[worker] = loss
        self._put_loss(look)

    def _put_loss(self, look: int) -> None:
        if losses := list(self._losses.values()):
            self._series["loss"].put(look, self._foremost, (mean(losses), min(losses), max(losses)))

    def _contributions_per_s(self, view: JobView) -> float | None:
        """Return the committed contributions a second over the last looks."""
        self._counted.append((view.at_ms, view.contributions))
        (began_ms, first), (ended_ms, last) = self._counted[0], self._counted[-1]
        return 1000 * max(0, last - first) / (ended_ms - began_ms) if ended_ms > began_ms else None


def _recorded_us(i: Iteration) -> float:
    """Return when an iteration ended; of one without times, when it was told, up to a tenth of a second later."""
    return i.ended_us if i.at_us else 1000 * int(i.entry.partition("-")[0])


def _bins(entries: Sequence[tuple[float, T]], until_s: float) -> Iterator[tuple[float, float, list[T]]]:
    """Divide what has a time in seconds into even parts of the time up to `until_s`, less a silence that is longer
    than all before it. Yield the end of each part, its length, and what is in it."""
    if not entries:
        return
    began, ended = min(at_s for at_s, _ in entries), max(at_s for at_s, _ in entries)
    if until_s > ended + _UNTOLD_S:
        ended = min(until_s, 2 * ended - began + 10)
    width = max(_SHORTEST_S, (ended - began) / _BINS)
    parts = defaultdict[int, list[T]](list)
    for at_s, value in entries:
        parts[int((at_s - began) / width)].append(value)
    for number in range(max(1, int((ended - began) / width))):
        yield round(began + (number + 1) * width, 1), width, parts[number]
