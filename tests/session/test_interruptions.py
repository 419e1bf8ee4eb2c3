"""Whatever interrupts a job, all that it keeps stays as old as its weights: optimizer state, rate, states of workers,
units, clocks, evaluations and the best version. Each interruption meets each of these in each mode."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

import pytest
from helpers.digits_job import proved
from helpers.harness import abandoned, aggregating, gradient, model, next_lr
from helpers.internals import abandon, fall_silent, segments_of
from helpers.shared_memory import take
from helpers.waiting import eventually
from kvps_aggregator import Aggregator, Outcome

import kvps
from kvps.evaluator import Evaluator, Orders
from kvps.history.best import best_file, best_of
from kvps.job import Job
from kvps.protocol.plan import Plan
from kvps.store import Store
from kvps.transport import shared_memory

ROUNDS, HALF, BEST = 6, 3, 2
RATE = kvps.schedules.StepLR(0.1, every=2, factor=0.5)
MODES: dict[str, dict[str, Any]] = {
    "rounds": {"staleness": 0},
    "stale": {"staleness": 1},
    "units": {"staleness": 0, "units": 2 * ROUNDS, "units_per_round": 2},
    "stale units": {"staleness": 1, "units": 2 * ROUNDS, "units_per_round": 2},
}


class Kept(NamedTuple):
    """What a job has at its end. `best` is the version that its evaluator has kept."""

    weights: dict[str, bytes]
    slots: dict[str, bytes]
    lr: float
    clock: dict[str, int]
    best: int | None


class Run:
    """A job of two workers in this process, which take turns. The state of each names the push that brought it."""

    def __init__(self, job: Job, directory: Path) -> None:
        self.directory = directory
        self.sessions: dict[str, kvps.Session] = {}
        self.newest: dict[str, str] = {}  # the last contribution of each worker that is in a version
        self.go_on_with(job)

    def go_on_with(self, job: Job) -> None:
        self.job = job
        self.evaluator = Evaluator(job, Orders(1, "loss", str(self.directory)))

    def come(self, *workers: str) -> None:
        """Join as a copy that was started again does."""
        for worker in workers:
            if worker in self.sessions:
                fall_silent(self.sessions[worker])
                abandon(self.sessions[worker])
            session = self.sessions[worker] = self.job.join(worker, takeover=True)
            assert session.state == self.job.states().get(worker, {}) or session.clock > self.job.state().clock[worker]

    def begin(self, worker: str) -> dict[str, Any] | None:
        """Begin a round; return the gradients, or None if there is no unit left."""
        session = self.sessions[worker]
        number = session.round
        if self.job.config.units:
            if (unit := session.next_unit()) is None:
                return None
            number = unit
        grads = gradient(session.pull(), 0 if self.job.config.units else session.rank, number)
        session.state = {"of": f"{session.incarnation} {session.sequence + 1}"}
        return grads

    def step(self, worker: str) -> bool:
        """Do a round; return False if there is no unit left."""
        if (grads := self.begin(worker)) is None:
            return False
        self.sessions[worker].push(grads)
        return True

    @contextmanager
    def aggregating(self) -> Iterator[Aggregator]:
        """Commit what waits, and hold the job's shards inside the block."""
        aggregator = Aggregator(self.job, Event())
        aggregator.hold(at_once=True)
        try:
            self.commit(aggregator)
            yield aggregator
        finally:
            aggregator.release()

    def train(self, rounds: int) -> None:
        """Bring each worker to a round, and commit and evaluate what comes."""
        with self.aggregating() as aggregator:
            while (behind := min((s.round, w) for w, s in self.sessions.items())) < (rounds,) and self.step(behind[1]):
                self.commit(aggregator)
            aggregator.held.flush()

    def commit(self, aggregator: Aggregator) -> None:
        while aggregator.work() is not Outcome.IDLE:
            pass
        contributions = [c for commit in self.job.log() for c in commit.plan.contributions]
        self.newest |= {c.worker: f"{c.incarnation} {c.seq}" for c in contributions}
        assert {worker: each["of"] for worker, each in self.job.states().items()} == self.newest
        last = self.job.evaluation()
        if self.job.state().version > (last.version if last else 0):
            version, _ = next(self.evaluator.versions())
            self.evaluator.report(version, {"loss": 1.0 + (version - BEST) ** 2})

    def ends(self) -> Kept:
        checkpoint = self.job.checkpoint()
        best = best_of(best_file(self.directory, self.job.name, self.job.id))
        if self.job.config.units:
            units = Counter(c.unit for commit in self.job.log() for c in commit.plan.contributions)
            assert set(units.values()) == {1}
        proved(self.job)
        return Kept(
            {name: array.tobytes() for name, array in self.job.snapshot()[1].items()},
            {name: array.tobytes() for name, array in checkpoint.slots.items()},
            next_lr(self.job),
            self.job.state().clock,
            best.version if best else None,
        )


Interruption = Callable[[Run, Store, Path], None]


def nothing(run: Run, store: Store, directory: Path) -> None: ...


def checkpoint(run: Run, store: Store, directory: Path) -> None:
    made = run.job.checkpoint()
    made.write(directory / made.filename)
    for session in run.sessions.values():
        session.leave(finished=False)
    run.sessions.clear()
    run.go_on_with(store.restore_job(kvps.Checkpoint.load(directory / made.filename), f"{run.job.name}-again"))
    run.come("w0", "w1")


def resume(run: Run, store: Store, directory: Path) -> None:
    """All processes are gone, and the server has the job."""
    run.go_on_with(store.job(run.job.name))
    run.come("w1", "w0")


def restart(worker: str) -> Interruption:
    """A copy is killed in a round, which it does again."""

    def interrupt(run: Run, store: Store, directory: Path) -> None:
        run.begin(worker)
        run.come(worker)

    return interrupt


def restart_behind_a_push(worker: str) -> Interruption:
    def interrupt(run: Run, store: Store, directory: Path) -> None:
        run.step(worker)
        run.come(worker)

    return interrupt


def suspend(run: Run, store: Store, directory: Path) -> None:
    run.job.suspend("a test")
    with run.aggregating() as aggregator:
        for worker, session in run.sessions.items():
            with suppress(kvps.JobSuspended):
                while run.step(worker):
                    run.commit(aggregator)
            assert session.stopping
            session.leave(finished=False)
    run.job.resume()
    run.come("w0", "w1")


def lose_memory(run: Run, store: Store, directory: Path) -> None:
    """All processes are gone, and all that was in memory. Redis has been given the version at which they were."""
    segments = segments_of(run.job)
    assert segments
    with abandoned(run.job) as aggregator:
        take(aggregator)
        for worker in sorted(run.sessions):
            run.step(worker)
            run.commit(aggregator)
    history = run.job.state().history
    shared_memory.forget(segments.folder)
    with aggregating(run.job):
        assert eventually(lambda: run.job.state().history != history)
    run.go_on_with(store.job(run.job.name))
    run.come("w0", "w1")


SAME: dict[str, Interruption] = {
    "checkpoint": checkpoint,
    "resume": resume,
    "restart of rank 0": restart("w0"),
    "restart of another rank": restart("w1"),
    "restart of rank 0 behind its push": restart_behind_a_push("w0"),
    "suspend": suspend,
    "loss of memory": lose_memory,
}


def reject(run: Run, store: Store, directory: Path) -> None:
    """The contribution of a worker does not count, and its state comes with the next one that does."""
    for worker in run.sessions:
        run.step(worker)
    aggregator = Aggregator(run.job, Event())
    aggregator.hold(at_once=True)
    plan = run.job.access.scripts.plan().plan
    assert isinstance(plan, Plan)
    run.job.access.scripts.reject(0, aggregator.held.shards[0].term, plan, plan.contributions[0], "a test")
    aggregator.release()


def evict(run: Run, store: Store, directory: Path) -> None:
    """A worker is evicted in a round, after a push that waits."""
    run.step("w1")
    run.job.evict(run.job.state().members["w1"], "a test")
    run.come("w1")


OTHER: dict[str, Interruption] = {"rejection": reject, "eviction": evict}


def _run(store: Store, mode: str, interruption: str, directory: Path) -> Kept:
    """Train a job that is interrupted in its middle."""
    directory.mkdir()
    transport = "shm" if interruption == "loss of memory" else "redis"
    settings = {"optimizer": kvps.SGD(RATE, momentum=0.9), "worker_timeout_ms": 60_000, "lease_ms": 1_000} | MODES[mode]
    job = store.create_job(f"job-{len(store.jobs())}", model(), workers=2, transport=transport, **settings)
    run = Run(job, directory)
    run.come("w0", "w1")
    run.train(2)
    if "units" in mode:
        job.set_lr(0.03)
    run.train(HALF)
    (SAME | OTHER).get(interruption, nothing)(run, store, directory)
    run.train(ROUNDS)
    return run.ends()


@pytest.mark.parametrize("mode", MODES)
def test_a_job_that_is_interrupted_ends_as_one_that_is_not(store: Store, tmp_path: Path, mode: str) -> None:
    whole = _run(store, mode, "nothing", tmp_path / "whole")
    assert whole.clock == {"w0": ROUNDS, "w1": ROUNDS}
    assert whole.best == BEST
    for interruption in SAME:
        ends = _run(store, mode, interruption, tmp_path / interruption)
        if MODES[mode]["staleness"]:  # the order of commits, and so the bits, may be another
            ends = ends._replace(weights=whole.weights, slots=whole.slots)
        assert ends == whole, interruption


@pytest.mark.parametrize("interruption", OTHER)
@pytest.mark.parametrize("mode", MODES)
def test_what_a_job_keeps_is_as_old_as_its_weights_though_work_is_lost(
    store: Store, tmp_path: Path, mode: str, interruption: str
) -> None:
    ends = _run(store, mode, interruption, tmp_path / "job")
    assert ends.best == BEST
