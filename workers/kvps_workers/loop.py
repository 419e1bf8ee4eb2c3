"""A worker's training loop: join, then for every batch pull, compute, push; leave when all rounds are done.

Which samples a round takes follows from (seed, rank, round) alone, so a run can be repeated, and whoever
rejoins goes on where the worker id had come to.
"""

from __future__ import annotations

import logging
import math
import time
from functools import lru_cache
from types import ModuleType
from typing import Any

import numpy as np

from kvps.config import JobConfig
from kvps.errors import InvalidSetting, InvalidTask
from kvps.job import Job
from kvps_workers.device import Device
from kvps_workers.task import Task, blamed, load_task

log = logging.getLogger("kvps.worker")


def train(job: Job, device: Device, worker: str | None = None, slow: float = 1.0) -> None:
    """Work on `job` as worker `worker` (None: the first free id) until all its rounds are done.

    `slow` stretches the worker's own part of each round, to study stragglers: 5.0 is a machine five times as
    slow. Raises InvalidTask, InvalidSetting, TaskFailed, WorkerAlive, WorkerEvicted, ServerLost.
    """
    config = job.config
    if not config.task:
        raise InvalidTask(f"job {job.name!r} has no task: it was made in Python, and its workers join from there")
    if slow < 1:
        raise InvalidSetting(f"slow must be 1 or more, not {slow:g}")
    task = load_task(config.task)
    xp = device.xp
    with job.join(worker, device=device.name) as session:
        log.info("job %s: joined as %s, rank %d, on %s", job.name, session.worker, session.rank, device.name)
        batches = batches_of(task, config, session.rank, xp)
        rounds = rounds_of(batches.samples, config.batch_size, config.epochs)
        while session.round < rounds:
            params = {name: device.upload(array) for name, array in session.pull().items()}
            began = time.perf_counter()
            with blamed(config.task):
                loss, grads = task.gradient(params, batches[session.round + 1], xp)
            session.push(grads, loss)
            if slow > 1:
                # Not a wait for anything: the slowness itself, of computing and sending alike.
                time.sleep((slow - 1) * (time.perf_counter() - began))


def rounds_of(samples: int, batch_size: int, epochs: int) -> int:
    """How many rounds a worker with so many samples does."""
    return epochs * math.ceil(samples / batch_size)


def batches_of(task: Task, config: JobConfig, rank: int, xp: ModuleType) -> Batches:
    """The batches of the job's worker of that rank. Who trains and who verifies both ask here. Raises TaskFailed."""
    with blamed(config.task):
        data = task.data(rank, config.workers, xp)
    return Batches(data, config.batch_size, (config.seed, rank), xp)


class Batches:
    """The batches of one worker by round, from 1: each epoch all its samples once, in an order of its own."""

    def __init__(self, data: tuple[Any, ...], batch_size: int, seed: tuple[int, ...], xp: ModuleType) -> None:
        self.samples = len(data[0])
        self._data = data
        self._xp = xp
        self._batch_size = batch_size
        self._per_epoch = rounds_of(self.samples, batch_size, 1)
        self._order = lru_cache(1)(lambda epoch: np.random.default_rng((*seed, epoch)).permutation(self.samples))

    def __getitem__(self, round_: int) -> tuple[Any, ...]:
        """What a round trains on: the rows of each array of the data."""
        epoch, batch = divmod(round_ - 1, self._per_epoch)
        rows = self._order(epoch)[batch * self._batch_size : (batch + 1) * self._batch_size]
        rows = self._xp.asarray(rows)
        return tuple(array[rows] for array in self._data)
