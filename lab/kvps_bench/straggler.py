"""`kvps_bench straggler`: how fast digits are trained with slow workers, in BSP, in rounds of units, in SSP and ASP.

A worker computes a real gradient, and *takes* a fixed time for it: it sleeps, five times as long when it is slow. So
the bench measures which worker waits for which, not the number of cores. All modes pay for the protocol itself.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from kvps_workers.task import load_task

from kvps.errors import KvpsError
from kvps.history.log_stream import LogStream
from kvps.job import Job
from kvps.optim import SGD
from kvps.staleness import ASP, mode_name
from kvps_bench.crew import Lab, Member, Place, crew, spawning
from kvps_bench.result import Bar, Figures, Row
from kvps_bench.roles import Aggregator, Role, temporary_job
from kvps_bench.turns import Ratio, Times, in_turns

TASK = "digits"
FACTOR = 5
_MOVES_EVERY = 8  # iterations
_CHANCE = 0.25
_PER_ROUND = 8  # units, for each worker
_UNITS = 2**40  # no run comes to their end
_BACKUP_AFTER = 3
_LOOK_EVERY_S = 0.02  # the resolution of a time; each look costs the training processor time
_PATIENCE_S = 120.0
_LEAST_VERSIONS = 5  # of a run that ends early: its speed is told from its log

KINDS: Mapping[str, str] = {
    "moves": f"one worker slow at a time, the next after {_MOVES_EVERY} iterations",
    "random": f"each iteration slow with p = {_CHANCE:g}",
    "always": "one worker always slow",
}


def is_slow(kind: str, rank: int, iteration: int, workers: int, random: np.random.Generator) -> bool:
    """Return whether that iteration of that worker is a slow one."""
    if kind == "moves":
        return iteration // _MOVES_EVERY % workers == rank
    return float(random.random()) < _CHANCE if kind == "random" else rank == 0


class Mode(NamedTuple):
    """When a worker may go on, whether versions are made of rounds of units, and into how many units the batch of a
    gradient is cut, each with its part of the samples and of the time."""

    staleness: int
    units: bool = False
    cut: int = 1

    @property
    def name(self) -> str:
        if self.units:
            return "rounds of units" if self.cut == 1 else "rounds of units, batch of BSP"
        return mode_name(self.staleness)


_BSP, _IN_UNITS, _SSP, _ASP = Mode(0), Mode(0, units=True), Mode(3), Mode(ASP)
_MODES = (_BSP, _IN_UNITS, Mode(0, units=True, cut=_PER_ROUND), _SSP, _ASP)


@dataclass(frozen=True)
class Setting:
    """The accuracy to reach, the number of workers, and a gradient's time in ms for a worker that is not slow."""

    accuracy: float = 0.95
    workers: int = 4
    compute_ms: float = 10.0


class Trainee(Role):
    """A worker that is slow at times."""

    def __init__(self, url: str, rank: int, setting: Setting, over: Any) -> None:
        super().__init__(url)
        self._rank, self._setting, self._over = rank, setting, over
        self._task = load_task(TASK)

    def train(self, name: str, kind: str, seed: int, cut: int) -> int:
        """Train until the run is over; return the number of contributions."""
        job, workers = self.store.job(name), self._setting.workers
        random = np.random.default_rng((seed, self._rank))
        samples = self._task.data(*(0, 1) if job.config.units else (self._rank, workers), np)
        with job.join(f"w{self._rank}") as session:
            while not self._over.is_set():
                unit = session.next_unit() if job.config.units else None
                number = session.round if unit is None else unit
                params = session.pull()
                if self._over.is_set():
                    break
                rows = _batch(len(samples[0]), self._task.batch_size // cut, number, seed)
                _, grads = self._task.gradient(params, tuple(array[rows] for array in samples), np)
                # The slow worker moves when all have done their iterations: units are those of all workers.
                slow = is_slow(kind, self._rank, number if unit is None else unit // cut // workers, workers, random)
                time.sleep(self._setting.compute_ms / 1000 / cut * (FACTOR if slow else 1))
                session.push(grads)
        return session.clock


def _batch(samples: int, size: int, number: int, seed: int) -> np.ndarray[Any, Any]:
    """Return the rows of a batch, of an order that each epoch draws anew."""
    epoch, place = divmod(number, samples // size)
    order = np.random.default_rng((seed, epoch)).permutation(samples)
    return order[place * size : (place + 1) * size]


class Course:
    """A crew that trains from the start again and again, and a judge that evaluates snapshots from outside."""

    def __init__(self, place: Place, members: Sequence[Member], setting: Setting, over: Any) -> None:
        self._place, self._setting, self._over = place, setting, over
        self._aggregator, *self._workers = members
        self._task = load_task(TASK)
        self._seed = 0
        self.contributions: dict[tuple[str, Mode], list[int]] = {}
        self.shares: dict[tuple[str, Mode], list[float]] = {}  # of the sum of the workers' speeds

    def run(self, kind: str, mode: Mode) -> list[float]:
        """Return the seconds from the workers' start to the first snapshot that is accurate enough."""
        self._seed += 1  # each run has another order of samples, because one order may be lucky
        settings: dict[str, Any] = {"workers": self._setting.workers, "staleness": mode.staleness}
        if mode.units:
            per_round = _PER_ROUND * self._setting.workers
            settings |= {"units": _UNITS, "units_per_round": per_round, "backup_after": _BACKUP_AFTER}
        params, optimizer = self._task.parameters(self._seed), SGD(lr=self._task.lr)
        with temporary_job(self._place, "unix", params, optimizer=optimizer, **settings) as job:
            self._aggregator("serve", job.name)
            self._over.clear()
            began = time.perf_counter()
            for worker in self._workers:
                worker.begin("train", job.name, kind, self._seed, mode.cut)
            try:
                took = self._until_accurate(job) - began
                self.contributions.setdefault((kind, mode), []).append(sum(job.state().clock.values()))
                while (state := job.state()).version < _LEAST_VERSIONS:
                    job.access.reader.await_change(state)
            finally:
                self._over.set()
                for worker in self._workers:
                    worker.end()
            share = at_full_speed(self._setting, kind) / mode.cut / _contribution_s(job)
            self.shares.setdefault((kind, mode), []).append(share)
        self._aggregator("rest")  # the job is removed, so `serve` ends
        return [took]

    def _until_accurate(self, job: Job) -> float:
        deadline = time.perf_counter() + _PATIENCE_S
        while (now := time.perf_counter()) < deadline:
            if self._task.evaluate(job.snapshot()[1], np)["accuracy"] >= self._setting.accuracy:
                return now
            time.sleep(_LOOK_EVERY_S)
        raise KvpsError(f"digits did not reach an accuracy of {self._setting.accuracy:g} in {_PATIENCE_S:g} s")


def _contribution_s(job: Job) -> float:
    """Return the seconds from one committed contribution to the next, by the log, between the first and last commit."""
    entries = LogStream(job.access).entries()
    times = [int(entry.split("-")[0]) for entry, fields in entries if fields["kind"] == "commit"]
    counts = [len(commit.plan.contributions) for commit in job.log()]
    return (times[-1] - times[0]) / 1000 / sum(counts[1:])


def at_full_speed(setting: Setting, kind: str) -> float:
    """Return the seconds from one contribution to the next if no worker ever waits: 1 over the sum of their speeds."""
    random = kind == "random"
    speeds = setting.workers / (1 + _CHANCE * (FACTOR - 1)) if random else setting.workers - 1 + 1 / FACTOR
    return setting.compute_ms / 1000 / speeds


def measure(lab: Lab, setting: Setting, kinds: Sequence[str]) -> Iterator[Row | Bar]:
    """Measure every kind of slowness in every mode, over each transport."""
    for transport in lab.transports:
        url, over = lab.place.urls[transport], spawning.Event()
        makers = [(Trainee, url, rank, setting, over) for rank in range(setting.workers)]
        with crew((Aggregator, url), *makers) as members:
            course = Course(lab.place, members, setting, over)
            keys = [(kind, mode) for kind in kinds for mode in _MODES]
            times = in_turns({key: partial(course.run, *key) for key in keys}, lab.turns)
        yield from (_row(transport, setting, key, times[key], course) for key in keys)
        yield from _bars(transport, times, course)


def _row(transport: str, setting: Setting, key: tuple[str, Mode], times: Times, course: Course) -> Row:
    kind, mode = key
    figures: Figures = {"slow": KINDS[kind], "workers": setting.workers, "compute_ms": setting.compute_ms}
    made = int(np.median(course.contributions[key][1:]))  # the first turn is a warm-up
    more = {"contributions": made, "ms_each": round(1000 * times.median / made, 2)}
    more["of_speeds"] = round(statistics.median(course.shares[key][1:]), 3)
    return Row(mode.name, transport, figures, times, more)


def _bars(transport: str, times: Mapping[tuple[str, Mode], Times], course: Course) -> Iterator[Bar]:
    # No bar for SSP with a worker that is always slow: at best it runs at that worker's pace, as BSP does.
    for kind, mode, limit in (("moves", _SSP, 1.8), ("random", _SSP, 1.3), ("always", _ASP, 2.0)):
        if (kind, mode) in times:
            what = f"{KINDS[kind]}: how much faster {mode.name} is than BSP, {transport}"
            yield Bar(11, what, False, limit, times[kind, _BSP].over(times[kind, mode]))
    for kind, limit in (("always", 0.9), ("moves", 0.85)):
        for mode, wanted in ((_IN_UNITS, limit), (_BSP, None)):
            if (kind, mode) in times:
                what = f"{KINDS[kind]}: {mode.name}, share of the sum of all speeds, {transport}"
                yield Bar(21, what, False, wanted, Ratio.of(course.shares[kind, mode][1:]))


def notes(setting: Setting) -> tuple[str, ...]:
    return (
        f"The job trains the digits to a test accuracy of {setting.accuracy:g} with {setting.workers} workers; a "
        f"snapshot is judged every {1000 * _LOOK_EVERY_S:g} ms from outside. A gradient takes {setting.compute_ms:g} "
        f"ms, {FACTOR} times as long when slow. The worker sleeps for that time, whatever the number of cores.",
        "The number of contributions depends on the mode: SSP and ASP step on fewer at once. With one worker that is "
        "always slow, SSP cannot win: at best it runs at that worker's pace.",
        f"A round of units has {_PER_ROUND} for each worker; each does as many as it can, and a unit that is out for "
        f"{_BACKUP_AFTER} times the median is handed out a second time. `of speeds` is how many contributions were "
        "committed, over those of workers that never wait, from the first commit to the last.",
        f"A round of whole gradients is a batch {_PER_ROUND} times that of BSP, so it takes more samples to "
        f"the same accuracy. With the batch of BSP each unit has 1/{_PER_ROUND} of its samples and of its time.",
    )
