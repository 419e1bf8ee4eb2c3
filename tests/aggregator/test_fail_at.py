"""A process dies or sleeps between any two of its commands: the weights are those of a plain loop, bit for bit.

The processes are threads, see `helpers.fail_at`. Real ones are killed in `test_aggregator` and in the chaos runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest
from helpers.fail_at import AGGREGATOR, POINTS, WORKER, Killed, Process
from helpers.harness import Params, check_chain, gradient, large_model, model, plain_loop
from helpers.slowly import slowly
from helpers.waiting import eventually
from kvps_aggregator import Aggregator

import kvps
from kvps.job import Job
from kvps.store import Store

LR = 0.05
ROUNDS = 5
SETTINGS = {"workers": 2, "optimizer": kvps.SGD(lr=LR), "lease_ms": 300, "worker_timeout_ms": 60_000}
DIES, SLEEPS = False, True
OF_CHUNKS = ("between staged chunks", "between chunks of a push", "after reading")
"""Points at commands that carry chunks: there are none over shared memory, and the first two need several chunks."""
ONCE = ("after the lease", "during renewal", "during clean-up", "after joining")
"""Points that are passed at least once; the others are passed in each round."""


class Crew:
    """The processes of one job, each on a thread. One that dies is replaced at once by another in the same role."""

    def __init__(self, store: Store, job: Job) -> None:
        self._store = store
        self._job = job
        self._threads: list[threading.Thread] = []
        self._processes: list[Process] = []
        self._errors: list[BaseException] = []
        self._over = False

    def start(self, run: Callable[[Job], None], process: Process | None = None) -> Process:
        """Run a role, in this process or a new one. After the death of this one another takes its role."""
        process = process or self.process()

        def main() -> None:
            try:
                run(process.store.job("job"))
            except Killed:
                if not self._over:
                    self.start(run)
            except BaseException as error:
                self._errors.append(error)

        self._threads.append(threading.Thread(target=main))
        self._threads[-1].start()
        return process

    def process(self) -> Process:
        """Return a new process, which does nothing yet."""
        self._processes.append(Process(self._store.url))
        return self._processes[-1]

    def await_end(self) -> None:
        """Wait until all threads have ended by themselves."""
        for thread in self._threads:  # which grows meanwhile
            thread.join(120)
        assert not any(thread.is_alive() for thread in self._threads)
        assert self._errors == []

    def kill(self) -> None:
        """End all that is left."""
        self._over = True
        for process in self._processes:
            process.kill()
        for thread in self._threads:
            thread.join()
        for process in self._processes:
            process.store.close()


@contextmanager
def crew_of(store: Store, params: Params, **settings: object) -> Iterator[tuple[Job, Crew]]:
    job = store.create_job("job", params, **SETTINGS | settings)
    for shard in range(job.layout.shards):  # the first sweep has something to delete
        store.client.call("SET", job.access.keys.gradient(shard, "w9", "1-dead", 1, 0), "what a dead worker left")
    crew = Crew(store, job)
    try:
        yield job, crew
    finally:
        crew.kill()


def _aggregate(job: Job) -> None:
    Aggregator(job, threading.Event()).run(until_finished=True)


def _worker(name: str, failed: threading.Event) -> Callable[[Job], None]:
    """Return the role of a worker, which begins its last round once a process has `failed`."""

    def work(job: Job) -> None:
        try:
            with job.join(name, takeover=True) as session:
                while session.round < ROUNDS:
                    if session.round == ROUNDS - 1:
                        failed.wait(120)
                    session.push(gradient(session.pull(), session.rank, session.round))
        except kvps.WorkerEvicted:  # another incarnation has replaced it while it slept
            return

    return work


def _check(job: Job, params: Params, late_bytes: bool = False) -> None:
    """Assert that the weights are those of the plain loop, and that no contribution is left, unless a process that
    slept may have sent it after the last sweep."""
    assert check_chain(job) == ROUNDS
    weights = job.snapshot()[1]
    for name, array in plain_loop(params, 2, ROUNDS, LR).items():
        np.testing.assert_array_equal(weights[name], array)
    access = job.access
    assert late_bytes or [key for key in access.client.scan(access.keys.all_bytes) if ":g:" in key] == []


def _survives(store: Store, point: str, nth: int, sleep: bool, transport: str) -> None:
    """Train with two workers, a holder and a standby, of which one fails at this point."""
    params = large_model() if point in OF_CHUNKS else model()
    with crew_of(store, params, transport=transport, shards=1 if transport == "shm" else 2) as (job, crew):
        victim = crew.process()
        victim.fail_at(point, nth, sleep)
        is_worker = point in WORKER
        if not is_worker:
            crew.start(_aggregate, victim)
            assert eventually(lambda: victim.fate.is_set() or all(job.access.reader.holders()))
        crew.start(_aggregate)
        crew.start(_worker("w0", victim.fate), victim if is_worker else None)
        crew.start(_worker("w1", victim.fate))
        assert victim.fate.wait(120), "it comes to the point"
        if sleep and is_worker:
            crew.start(_worker("w0", victim.fate))
        if sleep:
            version = job.state().version
            assert eventually(lambda: job.state().version >= min(version + 2, ROUNDS)), "the others go on"
            victim.awake.set()
        crew.await_end()
        _check(job, params, late_bytes=sleep)


def _cases(kinds: tuple[bool, bool], points: Sequence[str]) -> list[tuple[str, int, bool]]:
    """Return a case for each point. Both kinds of faults take turns, and so do the first three passages before a death.

    A process falls asleep at the first passage, so that there are rounds left in which it may do harm when it wakes.
    """
    cases = []
    for number, point in enumerate(points):
        sleep = kinds[number % 2]
        cases.append((point, 1 if sleep or point in ONCE else 1 + number % 3, sleep))
    return cases


@pytest.mark.parametrize(("point", "nth", "sleep"), _cases((DIES, SLEEPS), list(POINTS)))
def test_a_process_that_fails_at_a_point_changes_no_bit(store: Store, point: str, nth: int, sleep: bool) -> None:
    _survives(store, point, nth, sleep, "redis")


@pytest.mark.parametrize("transport", ["shm", *slowly(["redis"])])
@pytest.mark.parametrize(("point", "nth", "sleep"), _cases((SLEEPS, DIES), list(POINTS)))
def test_the_other_kind_of_fault_changes_none_either(
    store: Store, transport: str, point: str, nth: int, sleep: bool
) -> None:
    # Over shared memory no command carries chunks.
    _survives(store, point, nth, sleep, "redis" if point in OF_CHUNKS else transport)


@pytest.mark.slow  # each of both is killed alone above
@pytest.mark.parametrize("point", AGGREGATOR)
def test_a_holder_and_a_worker_may_die_in_one_job(store: Store, point: str) -> None:
    """The holder dies at this point, and a worker while its push is on its way."""
    params = large_model() if point in OF_CHUNKS else model()
    with crew_of(store, params, shards=2) as (job, crew):
        holder, worker = crew.process(), crew.process()
        holder.fail_at(point)
        worker.fail_at("push sent", 2)
        crew.start(_aggregate, holder)
        crew.start(_worker("w0", holder.fate), worker)
        crew.start(_worker("w1", holder.fate))
        for process in (holder, worker):
            assert process.fate.wait(120)
        crew.await_end()
        _check(job, params)
