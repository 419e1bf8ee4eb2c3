"""A job in one process, its aggregator and workers on threads: for notebooks, tests and scripts run alone.

All data goes through a real server, as it does between processes, so the weights are the same, bit for bit.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from importlib import import_module
from typing import Any, Protocol, Unpack

from kvps.arrays.layout import Array
from kvps.config import JobConfig, JobSettings, takes_settings
from kvps.connection.resp import Command
from kvps.errors import JobExists, JobNotFound, KvpsError, install
from kvps.job import Job
from kvps.notebook import Bar
from kvps.parsing import whole_setting
from kvps.protocol.job_state import State
from kvps.store import Store, connect

Gradient = Callable[[dict[str, Array], int, int], Any]


class Aggregator(Protocol):
    """What serves a job, as `kvps_aggregator.serve` does."""

    def __call__(self, job: Job, *, stop: threading.Event, until_finished: bool) -> None:
        """Commit what the workers of `job` push until `stop` is set, also after the job is finished."""


@takes_settings
def local(
    params: Mapping[str, Any],
    *,
    url: str | None = None,
    aggregator: Aggregator | None = None,
    config: JobConfig | None = None,
    **settings: Unpack[JobSettings],
) -> LocalJob:
    """Create a job that begins with `params` (name -> float32 array), and serve it in this process until it is closed.

    with kvps.local(params, workers=3, staleness=1, optimizer=kvps.SGD(lr=0.1)) as job:
        weights = job.train(gradient, rounds=50)

    `settings` are those of `JobConfig`, or one `config`. The server is that of `connect(url)`. The end of the block (or
    `close`, or the end of the process) ends and removes the job. `aggregator` serves the job on a thread; without it,
    that is `kvps_aggregator.serve`. Raises what `connect` and `Store.create_job` raise, and KvpsError if no aggregator
    is installed.
    """
    aggregator = aggregator or _installed_aggregator()
    config = JobConfig.of("kvps.local", config, settings)
    store = connect(url)
    try:
        while True:
            with suppress(JobExists):  # another process has just taken the name
                job = store.create_job(store.free_name("local"), params, config=config)
                return LocalJob(store, job.name, aggregator)
    except BaseException:
        store.close()
        raise


def _installed_aggregator() -> Aggregator:
    """Return the aggregator that comes with the library. By its name: the library imports no package above it."""
    try:
        serve: Aggregator = import_module("kvps_aggregator").serve
    except ModuleNotFoundError as error:
        raise KvpsError(
            f"kvps.local needs an aggregator, and {error.name} is not installed: {install()} brings it, or give your "
            f"own with aggregator="
        ) from None
    return serve


class LocalJob(Job):
    """A job that this process serves. `local` returns one."""

    def __init__(self, store: Store, name: str, aggregator: Aggregator) -> None:
        super().__init__(store.client, name)
        self._store = store
        self._aggregator = aggregator
        self._closed = False
        self._failures: list[BaseException] = []
        self._stop = threading.Event()
        self._server = threading.Thread(target=self._serve, name=f"kvps-serve-{name}", daemon=True)
        self._server.start()
        atexit.register(self.close)

    def _serve(self) -> None:
        try:
            self._aggregator(self, stop=self._stop, until_finished=False)
        except BaseException as error:
            self._failures.append(error)
            self.evict_all()  # a worker that waits for a version would wait for ever

    def evict_all(self) -> None:
        """Evict all workers: a worker that computes learns of it at its next push, a worker that waits is woken."""
        with suppress(KvpsError):
            for member in self.access.reader.state().members.values():
                if member.active:
                    self.evict(member, "the run in its process has failed")

    def state(self) -> State:
        """As `Job.state`; also raises what the aggregator raised."""
        self._check_served()
        return super().state()

    def _asked(self, commands: Sequence[Command]) -> list[Any]:
        self._check_served()
        return super()._asked(commands)

    def train(self, gradient: Gradient, rounds: int) -> dict[str, Array]:
        """Train `rounds` more rounds with every worker, each on a thread of its own; return the weights after them.

        ``gradient(params, rank, round)`` returns name -> float32 array, or a pair (loss, that mapping). Rounds count
        from 0, and the next call continues the count. All threads call `gradient` at once. An error that it raises, or
        Ctrl-C, stops all workers and is raised here; `train` may be called again after that. A notebook shows a bar.
        """
        crew = _Crew(self, gradient, whole_setting("rounds", rounds, 1))
        try:
            crew.run()
            self.await_finished()
        except KvpsError:
            self._check_served()
            raise
        return self.snapshot()[1]

    def _check_served(self) -> None:
        if self._failures:
            raise self._failures[0]

    def close(self) -> None:
        """End the aggregator and remove the job; does nothing in a fork. Raises what the aggregator raised."""
        if self._closed or not self.access.client.owner.is_here:
            return
        self._closed = True
        atexit.unregister(self.close)
        self._stop.set()
        self._server.join()
        try:
            with suppress(KvpsError if self._failures else JobNotFound):  # the aggregator's error is the one to raise
                if not self._store.ends_server:
                    self._store.remove_job(self.name, self.id)
        finally:
            self._store.close()
        self._check_served()

    def __enter__(self) -> LocalJob:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Crew:
    """The workers of a local job, each on a thread of its own."""

    def __init__(self, job: LocalJob, gradient: Gradient, rounds: int) -> None:
        self._job = job
        self._gradient = gradient
        self._rounds = rounds
        # A round in BSP is made of the workers that have joined, so none begins before all have.
        self._together = threading.Barrier(job.config.workers)
        self._failures: list[BaseException] = []
        self._failed = threading.Event()
        self._losses = dict[str, Any]()  # worker -> its newest loss, None if it says none
        self._done = dict[str, int]()  # worker -> rounds

    def run(self) -> None:
        """Run all workers to their end. Raises the first error of any of them."""
        workers = self._together.parties
        with ThreadPoolExecutor(workers, "kvps-worker") as threads:
            try:
                bar = Bar(workers * self._rounds)
                running = [threads.submit(self._work, f"w{number}") for number in range(workers)]
                while wait(running, bar.every_s).not_done:
                    self._show(bar)
                self._show(bar)
            except BaseException:  # Ctrl-C, or no more threads
                self._end()
                raise
        if self._failures:
            raise self._failures[0]

    def _work(self, worker: str) -> None:
        try:
            with self._job.join(worker) as session:
                self._together.wait()
                for round_ in range(session.round, session.round + self._rounds):
                    if self._failed.is_set():
                        session.leave(finished=False)
                        return
                    output = self._gradient(session.pull(), session.rank, round_)
                    loss, grads = output if isinstance(output, tuple) else (None, output)
                    session.push(grads, loss)
                    self._losses[worker], self._done[worker] = loss, self._done.get(worker, 0) + 1
        except BaseException as error:
            self._failures.append(error)  # before `_end`, whose errors in the other workers follow it
            self._end()

    def _show(self, bar: Bar) -> None:
        losses = [float(loss) for loss in list(self._losses.values()) if loss is not None]
        loss = f", loss {sum(losses) / len(losses):.4f}" if losses else ""
        done = sum(list(self._done.values()))
        bar.show(done, f"{done:,} of {self._together.parties * self._rounds:,} rounds{loss}")

    def _end(self) -> None:
        if not self._failed.is_set():
            self._failed.set()
            self._together.abort()
            self._job.evict_all()
