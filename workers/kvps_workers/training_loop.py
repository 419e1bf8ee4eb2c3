"""A worker's training loop: join, then for every round pull, compute, push; leave when all rounds are done.

A round is one batch, or as many as the worker takes local steps. The samples of a contribution follow from the seed and
its unit, or from seed, rank and round. So a run can be repeated, and a worker that joins again continues where its id
had stopped.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvps.config import JobConfig
from kvps.device.base import Device
from kvps.errors import InvalidSetting, InvalidTask, KvpsError, ServerFull, WorkerEvicted
from kvps.job import Job
from kvps.machine.files import private
from kvps.protocol.plan import Contribution
from kvps.session.session import Session
from kvps_workers.local_steps import LocalSteps
from kvps_workers.task import Task, blamed, load_task
from kvps_workers.wait_reporter import WaitReporter

log = logging.getLogger("kvps.worker")


def train(
    job: Job,
    device: Device,
    worker: str | None = None,
    slow: float = 1.0,
    acks: Path | None = None,
    prefetch: bool = False,
) -> None:
    """Train `job` as worker `worker` (None: the first free id) until no batch is left for it.

    A worker that was evicted and not replaced joins again. `slow` stretches the worker's own part of each round, to
    study stragglers: 5.0 acts as a machine five times as slow. Each acknowledged contribution appends a line to `acks`.
    With `prefetch`, the next weights arrive while the worker computes.
    Raises InvalidTask, InvalidSetting, TaskFailed, WorkerAlive, ServerLost.
    """
    config = job.config
    if not config.task:
        raise InvalidTask(f"job {job.name!r} has no task: it was made in Python, and its workers join from there")
    if slow < 1:
        raise InvalidSetting(f"slow must be 1 or more, not {slow:g}")
    task = load_task(config.task)
    acknowledged = 0
    while True:
        try:
            with job.join(worker, device=device, prefetch=prefetch) as session:
                worker = session.worker
                log.info("job %s: joined as %s, rank %d, on %s", job.name, worker, session.rank, device.name)
                if session.clock < acknowledged:
                    lost = acknowledged - session.clock
                    log.warning("job %s: the server lost %d acknowledged contributions of %s", job.name, lost, worker)
                try:
                    _work(job, session, task, device, slow, acks)
                finally:
                    acknowledged = session.clock
        except WorkerEvicted as error:
            # It was silent for too long, or the server was restarted. If another process has the id now, join raises.
            log.warning("%s", error)
            continue
        if not config.units or not job.await_unit():
            return


def _work(job: Job, session: Session, task: Task, device: Device, slow: float, acks: Path | None) -> None:
    """Pull, compute and push until no batch is left for this worker; then leave."""
    contributions = Contributions(job, task, session.rank, device)
    contributions.resume(session)
    try:
        _do_rounds(job, session, contributions, slow, acks)
    except BaseException:
        with suppress(KvpsError):  # the user must see the first error
            session.leave(finished=False, state=contributions.state(session.sequence))
        raise
    session.leave(state=contributions.state(session.sequence))


def _do_rounds(job: Job, session: Session, contributions: Contributions, slow: float, acks: Path | None) -> None:
    with WaitReporter(job, session) as patience:
        while (number := _next(session, contributions, job.config)) is not None:
            with patience.waiting():
                params = session.pull()
            began = time.perf_counter()
            loss, grads = contributions.compute(params, number, session.sequence)
            with patience.waiting():
                _push(session, grads, loss)
            if acks:
                with open(acks, "a", opener=private) as file:  # one write a line: a kill cuts the last line at most
                    file.write(f"{session.worker} {session.incarnation} {session.sequence}\n")
            if slow > 1:
                # This is the slowness itself, of computing and sending alike.
                time.sleep((slow - 1) * (time.perf_counter() - began))


def _push(session: Session, grads: Mapping[str, Any], loss: float) -> None:
    """Push, and try again while the server's memory is full: commits of others, or an operator, make room."""
    while True:
        try:
            session.push(grads, loss)
            return
        except ServerFull as full:
            log.warning("%s; tries again", full)


def _next(session: Session, contributions: Contributions, config: JobConfig) -> int | None:
    if config.units:
        return session.next_unit()
    return session.round if session.round < contributions.rounds else None


class Contributions:
    """The contributions of the worker of one rank, by their numbers. Training and `kvps verify` both compute here.

    rounds  how many rounds the worker does, if the job hands out no units
    """

    def __init__(self, job: Job, task: Task, rank: int, device: Device) -> None:
        self._config = job.config
        self._task = task
        self._xp = device.xp
        self._batches = batches_of(task, self._config, rank, device.xp)
        self._local = LocalSteps(task, self._config, job.layout, device) if self._config.local_steps > 1 else None
        self.rounds = -(-self._last // self._config.local_steps)

    @property
    def _last(self) -> int:
        """The number of batches in all epochs."""
        return self._config.epochs * self._batches.per_epoch

    def compute(self, params: Mapping[str, Any], number: int, accepted: int = 0) -> tuple[float, Mapping[str, Any]]:
        """Return the loss of contribution `number`, counted from 0, and its gradient or, after local steps, its
        pseudo-gradient: name -> float32 array. `accepted` is how many of this session were accepted before. Raises
        TaskFailed, LayoutMismatch, NotFinite."""
        if self._local:
            return self._local.pseudo_gradient(params, self._numbered(number), accepted)
        return self._task.gradient(params, self._batch(number), self._xp)

    def resume(self, session: Session) -> None:
        """Go on from the state of the inner optimizer that the worker left, and say if there is none. Raises
        CorruptData."""
        if self._local and self._config.inner_state:
            kind = self._config.inner_optimizer.kind
            if self._local.restore(session.inherited_state()):
                log.info("worker %s: its inner %s goes on from the state that it left", session.worker, kind)
            elif session.clock:
                log.warning(
                    "worker %s: its inner %s starts anew, because the last process did not leave its state: it was "
                    "killed or evicted",
                    session.worker,
                    kind,
                )

    def state(self, accepted: int) -> dict[str, NDArray[Any]]:
        """Return the state of the inner optimizer after so many accepted contributions; {} if it has none."""
        return self._local.state(accepted) if self._local else {}

    def _numbered(self, number: int) -> Iterator[tuple[float, tuple[Any, ...]]]:
        """Yield the batches of a contribution, each with how many its worker has had before, as if all workers of a job
        with units had the same number."""
        first, steps = number * self._config.local_steps, self._config.local_steps
        if first < self._last:  # a job made in Python may have units beyond its epochs
            steps = min(steps, self._last - first)
        sharing = self._config.workers if self._config.units else 1
        for batch in range(first, first + steps):
            yield batch / sharing, self._batch(batch)

    def _batch(self, number: int) -> tuple[Any, ...]:
        with blamed(self._config.task):  # the task's arrays may not allow taking rows
            return self._batches[number]


def batches_of(task: Task, config: JobConfig, rank: int, xp: ModuleType) -> Batches:
    """Return the batches of the worker of that rank, numbered by units if the job has any, else by its rounds.

    Raises TaskFailed.
    """
    if config.units:
        return Batches(task.data(0, 1, xp), config.batch_size, (config.seed,), xp)
    return Batches(task.data(rank, config.workers, xp), config.batch_size, (config.seed, rank), xp)


def rounds_of(samples: int, batch_size: int, epochs: int, local_steps: int = 1) -> int:
    """Return how many rounds a worker with so many samples does; the last may have fewer batches than the others."""
    return -(-epochs * math.ceil(samples / batch_size) // local_steps)


def number_of(contribution: Contribution) -> int:
    """Return the number by which `Contributions` computes a contribution again."""
    return contribution.round - 1 if contribution.unit is None else contribution.unit


class Batches:
    """The numbered batches of some samples: each epoch has every sample once, in an order of its own."""

    def __init__(self, data: tuple[Any, ...], batch_size: int, seed: tuple[int, ...], xp: ModuleType) -> None:
        self.samples = len(data[0])
        self._data = data
        self._xp = xp
        self._batch_size = batch_size
        self.per_epoch = rounds_of(self.samples, batch_size, 1)
        self._order = lru_cache(1)(lambda epoch: np.random.default_rng((*seed, epoch)).permutation(self.samples))

    def __getitem__(self, number: int) -> tuple[Any, ...]:
        """Return batch `number`, counted from 0 over all epochs: its rows of each array of the data."""
        epoch, batch = divmod(number, self.per_epoch)
        rows = self._order(epoch)[batch * self._batch_size : (batch + 1) * self._batch_size]
        rows = self._xp.asarray(rows)
        return tuple(array[rows] for array in self._data)
