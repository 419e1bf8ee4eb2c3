"""What a worker pushes in each round.

Training and `kvps verify` both compute here, so a replay makes the same bits.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from kvps.device.base import Device
from kvps.errors import counted
from kvps.job import Job
from kvps.session.session import Session
from kvps_workers.gradient import round_gradient
from kvps_workers.helper_processes import HelperProcesses
from kvps_workers.rounds import Rounds
from kvps_workers.task import Task

log = logging.getLogger("kvps.worker")


class Computed(NamedTuple):
    """A contribution: the mean loss, name -> float32 array, and how many samples it stands for."""

    loss: float
    grads: Mapping[str, Any]
    samples: int


class Contributions:
    """The contributions of the worker of one rank, by the numbers of their rounds or units."""

    def __init__(self, job: Job, task: Task, rank: int, device: Device) -> None:
        self._config, self._layout = job.config, job.layout
        self._task, self._rank, self._xp = task, rank, device.xp
        self._rounds = Rounds(task, self._config, rank, device.xp)
        self._helpers: HelperProcesses | None = None

    @contextmanager
    def helped(self) -> Iterator[None]:
        """Have the job's helper processes compute their shares within the block, if it has any."""
        if self._config.procs == 1:
            yield
            return
        with HelperProcesses(self._config, self._layout, self._rank) as self._helpers:
            try:
                yield
            finally:
                self._helpers = None

    def compute(self, params: Mapping[str, Any], number: int) -> Computed:
        """Return contribution `number`, counted from 0. Raises TaskFailed, LayoutMismatch."""
        if self._helpers:
            gradient = self._helpers.round_gradient(self._task, self._rounds, number, params)
        else:
            gradient = round_gradient(self._task, self._layout, self._rounds, number, params, self._xp)
        return Computed(*gradient, len(self._rounds.rows(number)))

    def weight(self, samples: int) -> int | None:
        """Return the weight of a contribution of so many samples; None where all count alike."""
        return samples if self._config.reduction == "weighted" else None

    def next(self, session: Session) -> int | None:
        """Return the number of the next contribution of a session; None if there is none for it. Raises what
        `Session.next_unit` raises."""
        if self._config.units:
            return session.next_unit()
        return session.round if session.round < self._rounds.total else None

    def is_over(self, number: int, session: Session) -> bool:
        """Return whether the job has made the round of contribution `number` before this pull, without this worker."""
        return not self._config.units and session.round > number

    def log_undone(self, session: Session) -> None:
        """Log how much of this worker's data is in no version, because rounds were made without it."""
        if not self._config.partial_rounds or self._config.units:
            return
        done, of = session.clock, self._rounds.total
        if done < of:
            undone, its = f"{of - done:,}", counted(of, "round")
            log.info(
                "worker %s has %s of its %s in no version: a quorum went on without it", session.worker, undone, its
            )
