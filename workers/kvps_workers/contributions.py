"""What a worker pushes in each round: a gradient, or how far its local steps came.

Training and `kvps verify` both compute here, so a replay makes the same bits.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from numpy.typing import NDArray

from kvps.device.base import Device
from kvps.job import Job
from kvps.session.session import Session
from kvps_workers.gradient import round_gradient
from kvps_workers.helper_processes import HelperProcesses
from kvps_workers.local_steps import LocalSteps
from kvps_workers.rounds import Rounds
from kvps_workers.task import Task

log = logging.getLogger("kvps.worker")


class Contributions:
    """The contributions of the worker of one rank, by the numbers of their rounds or units.

    total  how many rounds the worker does, if the job hands out no units
    """

    def __init__(self, job: Job, task: Task, rank: int, device: Device) -> None:
        self._config, self._layout = job.config, job.layout
        self._task, self._rank, self._xp = task, rank, device.xp
        self._rounds = Rounds(task, self._config, rank, device.xp)
        self._local = LocalSteps(task, self._config, job.layout, device) if self._config.local_steps > 1 else None
        self._helpers: HelperProcesses | None = None
        self.total = self._rounds.total

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

    def compute(self, params: Mapping[str, Any], number: int, accepted: int = 0) -> tuple[float, Mapping[str, Any]]:
        """Return the loss of contribution `number`, counted from 0, and its gradient or, after local steps, its
        pseudo-gradient: name -> float32 array. `accepted` is how many of this session were accepted before. Raises
        TaskFailed, LayoutMismatch, NotFinite."""
        if self._local:
            return self._local.pseudo_gradient(params, self._numbered(number), accepted)
        if self._helpers:
            return self._helpers.round_gradient(self._task, self._rounds, number, params)
        return round_gradient(self._task, self._layout, self._rounds, number, params, self._xp)

    def samples_of(self, number: int) -> int:
        """Return how many samples a contribution stands for."""
        return sum(map(len, self._rounds.batches(number)))

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
        sharing = self._config.workers if self._config.units else 1
        for batch, rows in zip(self._rounds.numbers(number), self._rounds.batches(number), strict=True):
            yield batch / sharing, self._rounds.samples(rows)
