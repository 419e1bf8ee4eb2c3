"""`kvps_bench straggler`: how long the digits take to reach an accuracy with slow workers, in BSP, SSP and ASP.

A worker computes a real gradient, and *takes* a fixed time for it: it sleeps, four times as long when it is slow. So
the bench measures which worker waits for which, not the number of cores. All modes pay for the protocol itself.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
from kvps_bench.turns import Case, Times, in_turns

TASK = "digits"
FACTOR = 4
_MOVES_EVERY = 8  # iterations
_CHANCE = 0.25
_MODES = (0, 3, ASP)
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
        with job.join(f"w{self._rank}") as session:
            while not self._over.is_set():
                number = session.round
                params = session.pull()
                if self._over.is_set():
                    break
                _, grads = round_gradient(self._task, job.layout, rounds, number, params, np)
                slow = is_slow(kind, self._rank, number, self._setting.workers, random)
                time.sleep(self._setting.compute_ms / 1000 * (FACTOR if slow else 1))
                session.push(grads)
            return session.clock


class Course:
    """A crew that trains from the start again and again, and a judge that evaluates snapshots from outside."""

    def __init__(self, place: Place, members: Sequence[Member], setting: Setting, over: Any) -> None:
        self._place, self._setting, self._over = place, setting, over
        self._aggregator, *self._workers = members
        self._task = load_task(TASK)
        self.seed = 0
        self.contributions: dict[tuple[str, int], list[int]] = {}

    def run(self, kind: str, staleness: int) -> list[float]:
        """Return the seconds from the workers' start to the first snapshot that is accurate enough."""
        self.seed += 1  # each run has another order of samples, because one order may be lucky
        task = self._task
        settings: dict[str, Any] = {
            "workers": self._setting.workers,
            "staleness": staleness,
            "task": TASK,
            "seed": self.seed,
        }
        settings |= {"batch_size": task.batch_size, "epochs": 10_000, "optimizer": SGD(lr=task.lr)}
        with temporary_job(self._place, "unix", task.parameters(self.seed), **settings) as job:
            self._aggregator("serve", job.name)
            self._over.clear()
            began = time.perf_counter()
            for worker in self._workers:
                worker.begin("train", job.name, kind)
            try:
                took = self._until_accurate(job) - began
                self.contributions.setdefault((kind, staleness), []).append(sum(job.clock().values()))
            finally:
                self._over.set()
                for worker in self._workers:
                    worker.end()
        self._aggregator("rest")  # the job is removed, so `serve` ends
        return [took]

    def _until_accurate(self, job: Job) -> float:
        deadline = time.perf_counter() + _PATIENCE_S
        while (now := time.perf_counter()) < deadline:
            if self._task.evaluate(job.snapshot()[1], np)["accuracy"] >= self._setting.accuracy:
                return now
            time.sleep(_LOOK_EVERY_S)
        raise KvpsError(f"digits did not reach an accuracy of {self._setting.accuracy:g} in {_PATIENCE_S:g} s")


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
            keys = {f"{kind} {mode_name(s)}": (kind, s) for kind in kinds for s in _MODES}
            times = in_turns({name: _case(course, *key) for name, key in keys.items()}, turns)
        for name, (kind, staleness) in keys.items():
            made = course.contributions[kind, staleness][1:]  # the first turn is a warm-up
            rows.append(_row(transport, setting, kind, staleness, times[name], made))
        bars += _bars(transport, times)
    return Result("straggler", turns, rows, bars, machine(place.store.client), _notes(setting))


def _case(course: Course, kind: str, staleness: int) -> Case:
    return lambda: course.run(kind, staleness)


def _row(
    transport: str, setting: Setting, kind: str, staleness: int, times: Times, contributions: Sequence[int]
) -> Row:
    figures: Figures = {"slow": KINDS[kind], "workers": setting.workers, "compute_ms": setting.compute_ms}
    made = int(np.median(contributions))
    more = {
        "contributions": made,
        "ms_each": round(1000 * times.median / made, 2),
        "ms_each_at_best": round(1000 * at_best(setting, kind, staleness), 2),
    }
    return Row(mode_name(staleness), transport, figures, times, more)


def at_best(setting: Setting, kind: str, staleness: int) -> float:
    """Return the seconds that a contribution takes if only the bound holds workers back: see `ideal`."""
    random = [np.random.default_rng((0, rank)) for rank in range(setting.workers)]

    def takes(rank: int, iteration: int) -> float:
        slow = is_slow(kind, rank, iteration, setting.workers, random[rank])
        return setting.compute_ms / 1000 * (FACTOR if slow else 1)

    return ideal.contribution_s(takes, setting.workers, staleness)


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
    )
