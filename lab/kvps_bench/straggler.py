"""`kvps_bench straggler`: how fast digits are trained with slow workers, in BSP, in rounds of units, in SSP and ASP.

A worker computes a real gradient, and *takes* a fixed time for it: it sleeps, five times as long when it is slow. So
the bench measures which worker waits for which, not the number of cores. All modes pay for the protocol itself.
"""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from kvps_workers.gradient import round_gradient
from kvps_workers.rounds import Rounds
from kvps_workers.task import load_task

from kvps.errors import KvpsError
from kvps.job import Job
from kvps.optim import SGD
from kvps.staleness import ASP, mode_name
from kvps_bench import ideal
from kvps_bench.crew import Member, Place, crew, spawning
from kvps_bench.result import Bar, Figures, Result, Row, machine
from kvps_bench.roles import Aggregator, Role, temporary_job
from kvps_bench.turns import Case, Ratio, Times, in_turns

TASK = "digits"
FACTOR = 5
_MOVES_EVERY = 8  # iterations
_CHANCE = 0.25
_PER_ROUND = 8  # units, for each worker
_UNITS = 2**40  # no run comes to their end
_BACKUP_AFTER = 3
_LOOK_EVERY_S = 0.02  # the resolution of a time; each look costs the training processor time
_PATIENCE_S = 120.0

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


_BSP, _IN_UNITS, _ASP = Mode(0), Mode(0, units=True), Mode(ASP)
_MODES = (_BSP, _IN_UNITS, Mode(0, units=True, cut=_PER_ROUND), Mode(3), _ASP)


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

    def train(self, name: str, kind: str) -> int:
        """Train until the run is over; return the number of contributions."""
        job = self.store.job(name)
        random = np.random.default_rng((job.config.seed, self._rank))
        rounds = Rounds(self._task, job.config, self._rank, np)
        workers, part = self._setting.workers, job.config.batch_size / self._task.batch_size
        with job.join(f"w{self._rank}") as session:
            while not self._over.is_set():
                unit = session.next_unit() if job.config.units else None
                number = session.round if unit is None else unit
                params = session.pull()
                if self._over.is_set():
                    break
                _, grads = round_gradient(self._task, job.layout, rounds, number, params, np)
                # The slow worker moves when all have done their iterations: units are those of all workers.
                slow = is_slow(
                    kind, self._rank, number if unit is None else int(unit * part) // workers, workers, random
                )
                time.sleep(self._setting.compute_ms / 1000 * part * (FACTOR if slow else 1))
                session.push(grads)
        return session.clock


class Course:
    """A crew that trains from the start again and again, and a judge that evaluates snapshots from outside."""

    def __init__(self, place: Place, members: Sequence[Member], setting: Setting, over: Any) -> None:
        self._place, self._setting, self._over = place, setting, over
        self._aggregator, *self._workers = members
        self._task = load_task(TASK)
        self.seed = 0
        self.contributions: dict[tuple[str, Mode], list[int]] = {}
        self.shares: dict[tuple[str, Mode], list[float]] = {}  # of the sum of the workers' speeds

    def run(self, kind: str, mode: Mode) -> list[float]:
        """Return the seconds from the workers' start to the first snapshot that is accurate enough."""
        self.seed += 1  # each run has another order of samples, because one order may be lucky
        with self._job(mode) as job:
            began = time.perf_counter()
            with self._training(job, kind):
                took = self._until_accurate(job) - began
                self.contributions.setdefault((kind, mode), []).append(sum(job.clock().values()))
                _await_version(job, 5)  # of a run that ends early
            each = _contribution_s(job)
            self.shares.setdefault((kind, mode), []).append(at_full_speed(self._setting, kind) / mode.cut / each)
        self._aggregator("rest")  # the job is removed, so `serve` ends
        return [took]

    def stop_one(self) -> float:
        """Stop a worker in the middle of a unit, and let it go on later. Return how much longer the round took than
        others, in times of a unit."""
        self.seed += 1
        with self._job(_IN_UNITS) as job:
            with self._training(job, ""):
                _await_version(job, 10)
                pid = self._workers[0].process.pid
                assert pid
                os.kill(pid, signal.SIGSTOP)
                _await_version(job, 13)  # made without it
                os.kill(pid, signal.SIGCONT)
            times = _commit_ms(job)
        self._aggregator("rest")
        lasted = [later - earlier for earlier, later in pairwise(times)]
        usual = statistics.median(lasted[3:9])
        return (max(lasted[9:12]) - usual) / (usual / _PER_ROUND)

    def _job(self, mode: Mode) -> AbstractContextManager[Job]:
        task, workers = self._task, self._setting.workers
        settings: dict[str, Any] = {"workers": workers, "staleness": mode.staleness, "task": TASK, "seed": self.seed}
        settings |= {"batch_size": task.batch_size // mode.cut, "epochs": 10_000, "optimizer": SGD(lr=task.lr)}
        if mode.units:
            settings |= {"units": _UNITS, "units_per_round": _PER_ROUND * workers, "backup_after": _BACKUP_AFTER}
        return temporary_job(self._place, "unix", task.parameters(self.seed), **settings)

    @contextmanager
    def _training(self, job: Job, kind: str) -> Iterator[None]:
        """All workers train the job within the block."""
        self._aggregator("serve", job.name)
        self._over.clear()
        for worker in self._workers:
            worker.begin("train", job.name, kind)
        try:
            yield
        finally:
            self._over.set()
            for worker in self._workers:
                worker.end()

    def _until_accurate(self, job: Job) -> float:
        deadline = time.perf_counter() + _PATIENCE_S
        while (now := time.perf_counter()) < deadline:
            if self._task.evaluate(job.snapshot()[1], np)["accuracy"] >= self._setting.accuracy:
                return now
            time.sleep(_LOOK_EVERY_S)
        raise KvpsError(f"digits did not reach an accuracy of {self._setting.accuracy:g} in {_PATIENCE_S:g} s")


def _await_version(job: Job, version: int) -> None:
    while (state := job.state()).version < version:
        job.await_change(state)


def _commit_ms(job: Job) -> list[int]:
    """Return when each version was committed, in the server's milliseconds."""
    return [int(entry.split("-")[0]) for entry, fields in job.entries() if fields["kind"] == "commit"]


def _contribution_s(job: Job) -> float:
    """Return the seconds from one committed contribution to the next, by the log, between the first and last commit."""
    times, counts = _commit_ms(job), [len(commit.plan.contributions) for commit in job.log()]
    return (times[-1] - times[0]) / 1000 / sum(counts[1:])


def measure(
    place: Place, transports: Sequence[str], setting: Setting, turns: int, kinds: Sequence[str] = tuple(KINDS)
) -> Result:
    """Measure every kind of slowness in every mode, over each transport."""
    rows: list[Row] = []
    bars: list[Bar] = []
    for transport in transports:
        url, over = place.urls[transport], spawning.Event()
        makers = [(Trainee, url, rank, setting, over) for rank in range(setting.workers)]
        with crew((Aggregator, url), *makers) as members:
            course = Course(place, members, setting, over)
            keys = {f"{kind} {mode.name}": (kind, mode) for kind in kinds for mode in _MODES}
            times = in_turns({name: _case(course, *key) for name, key in keys.items()}, turns)
            stops = Ratio.of([course.stop_one() for _ in range(turns)])
        for name, (kind, mode) in keys.items():
            made = course.contributions[kind, mode][1:]  # the first turn is a warm-up
            rows.append(_row(transport, setting, kind, mode, times[name], made, course.shares[kind, mode][1:]))
        bars += [*_bars(transport, times), *_share_bars(transport, course, kinds, stops)]
    return Result("straggler", turns, rows, bars, machine(place.store.client), _notes(setting))


def _case(course: Course, kind: str, mode: Mode) -> Case:
    return lambda: course.run(kind, mode)


def _row(
    transport: str,
    setting: Setting,
    kind: str,
    mode: Mode,
    times: Times,
    contributions: Sequence[int],
    shares: Sequence[float],
) -> Row:
    figures: Figures = {"slow": KINDS[kind], "workers": setting.workers, "compute_ms": setting.compute_ms}
    made = int(np.median(contributions))
    more: dict[str, float | int | str] = {"contributions": made, "ms_each": round(1000 * times.median / made, 2)}
    more["ms_each_at_best"] = round(1000 * at_best(setting, kind, mode), 2)
    more["of_speeds"] = round(statistics.median(shares), 3)
    return Row(mode.name, transport, figures, times, more)


def at_best(setting: Setting, kind: str, mode: Mode) -> float:
    """Return the seconds that a contribution takes if only the bound holds workers back: see `ideal`. That the last
    units of a round hold them back too is left out."""
    if mode.units:
        return at_full_speed(setting, kind) / mode.cut
    random = [np.random.default_rng((0, rank)) for rank in range(setting.workers)]

    def takes(rank: int, iteration: int) -> float:
        slow = is_slow(kind, rank, iteration, setting.workers, random[rank])
        return setting.compute_ms / 1000 * (FACTOR if slow else 1)

    return ideal.contribution_s(takes, setting.workers, mode.staleness)


def at_full_speed(setting: Setting, kind: str) -> float:
    """Return the seconds from one contribution to the next if no worker ever waits: 1 over the sum of their speeds."""
    random = kind == "random"
    speeds = setting.workers / (1 + _CHANCE * (FACTOR - 1)) if random else setting.workers - 1 + 1 / FACTOR
    return setting.compute_ms / 1000 / speeds


def _share_bars(transport: str, course: Course, kinds: Sequence[str], stops: Ratio) -> list[Bar]:
    """Return the bars of rounds of units: their share of the sum of the workers' speeds, and what a stop costs."""
    bars = []
    for kind in [kind for kind in ("always", "moves") if kind in kinds]:
        shares = {mode: course.shares[kind, mode][1:] for mode in _MODES}
        limit = {"always": 0.9, "moves": 0.85}[kind]
        for mode, wanted in ((_IN_UNITS, limit), (_BSP, None)):
            what = f"{KINDS[kind]}: {mode.name}, share of the sum of all speeds, {transport}"
            bars.append(Bar(21, what, False, wanted, Ratio.of(shares[mode])))
        over_asp = [mine / its for mine, its in zip(shares[_IN_UNITS], shares[_ASP], strict=True)]
        what = f"{KINDS[kind]}: {_IN_UNITS.name}, speed over ASP, which waits for nobody, {transport}"
        bars.append(Bar(21, what, False, limit, Ratio.of(over_asp)))
    what = f"a worker is stopped in a unit: what its round takes longer, in units' times, {transport}"
    return [*bars, Bar(21, what, True, _BACKUP_AFTER, stops)]


def _bars(transport: str, times: Mapping[str, Times]) -> list[Bar]:
    def bar(number: int, kind: str, mode: str, limit: float) -> Bar:
        ratio = times[f"{kind} BSP"].over(times[f"{kind} {mode}"])
        return Bar(number, f"{KINDS[kind]}: how much faster {mode} is than BSP, {transport}", False, limit, ratio)

    # No bar for SSP with a worker that is always slow: at best it runs at that worker's pace, as BSP does.
    wanted = [(11, "moves", "SSP(3)", 1.8), (11, "random", "SSP(3)", 1.3), (11, "always", "ASP", 2.0)]
    return [bar(*each) for each in wanted if f"{each[1]} BSP" in times]


def _notes(setting: Setting) -> tuple[str, ...]:
    return (
        f"The job trains the digits to a test accuracy of {setting.accuracy:g} with {setting.workers} workers; a "
        f"snapshot is judged every {1000 * _LOOK_EVERY_S:g} ms from outside. A gradient takes {setting.compute_ms:g} "
        f"ms, {FACTOR} times as long when slow. The worker sleeps for that time, whatever the number of cores.",
        "`ms each at best` is what a contribution would take if protocol, server and processors took no time, and only "
        "the bound held workers back. The number of contributions depends on the mode: SSP and ASP step on fewer at "
        "once.",
        "With one worker that is always slow, SSP cannot win: at best it runs at that worker's pace.",
        f"A round of units has {_PER_ROUND} for each worker; each does as many as it can, and a unit that is out for "
        f"{_BACKUP_AFTER} times the median is handed out a second time. `of speeds` is how many contributions were "
        "committed, over those of workers that never wait, from the first commit to the last.",
        f"A round of whole gradients is a batch {_PER_ROUND} times that of BSP, so it takes more samples to "
        f"the same accuracy. With the batch of BSP each unit has 1/{_PER_ROUND} of its samples and of its time.",
    )
