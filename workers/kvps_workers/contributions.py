"""What a worker pushes in each round: a gradient, or how far its local steps came.

Training and `kvps verify` both compute here, so a replay makes the same bits.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from numpy.typing import NDArray

from kvps.arrays.parts import fragment_of
from kvps.device.base import Device
from kvps.errors import counted
from kvps.job import Job
from kvps.session.session import Session
from kvps_workers.gradient import round_gradient
from kvps_workers.helper_processes import HelperProcesses
from kvps_workers.local_steps import LocalSteps
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
        self._local = LocalSteps(task, self._config, job.layout, device) if self._config.takes_local_steps else None
        self._helpers: HelperProcesses | None = None
        self._last: int | None = None  # the last one that was computed
        self._samples = 0  # that its local steps have had so far

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

    def compute(self, params: Mapping[str, Any], number: int, accepted: int = 0) -> Computed:
        """Return contribution `number`, counted from 0: its gradient or, after local steps, its pseudo-gradient.

        `accepted` is how many of this session were accepted before. Raises TaskFailed, LayoutMismatch, NotFinite."""
        if self._local:
            self._last, self._samples = number, 0
            batches = self._batches(number)
            loss, grads = self._local.pseudo_gradient(params, batches, accepted, self.part(number))
            return Computed(loss, grads, self._samples)
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

    def part(self, number: int) -> str:
        """Return the part of the model that a contribution has: a fragment, but the last one has all of it."""
        fragments = self._config.fragments
        return fragment_of(number, fragments) if fragments > 1 and number < self._rounds.total - 1 else ""

    def part_to_pull(self, number: int) -> str:
        """Return the part of the weights that a contribution needs: the fragment that was pushed before it, or all."""
        return self.part(self._last) if self._last is not None and self._last == number - 1 else ""

    def resume(self, session: Session) -> None:
        """Go on from the state of the inner optimizer that the worker left, and say if there is none. Raises
        CorruptData."""
        if self._local and self._config.inner_optimizer.slots and not self._config.unit_rounds:
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
        """Return the state of the inner optimizer after so many accepted contributions; {} if none goes on."""
        return self._local.state(accepted) if self._local and not self._config.unit_rounds else {}

    def _batches(self, number: int) -> Iterator[tuple[float, tuple[Any, ...]]]:
        """Yield the batches of a contribution, each with how many its worker has had before, as if all workers of a job
        with units had the same number: in rounds of units, as if one worker did one of a round. Count their samples."""
        sharing = self._config.workers if self._config.units else 1
        sharing = self._config.units_per_round if self._config.unit_rounds else sharing
        for batch in self._rounds.numbers(number):
            rows = self._rounds.rows(batch)
            self._samples += len(rows)
            yield batch / sharing, self._rounds.samples(rows)
