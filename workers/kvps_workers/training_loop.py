"""A worker's training loop: join, then for every round pull, compute, push; leave when all rounds are done.

A round is one batch. The samples of a contribution follow from the seed and its unit, or from seed, rank and round. So
a run can be repeated, and a worker that joins again continues where its id had stopped.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from kvps.device.base import CPU, Device
from kvps.errors import (
    ContributionLate,
    InvalidSetting,
    InvalidTask,
    JobStopped,
    KvpsError,
    ServerFull,
    WorkerEvicted,
    counted,
)
from kvps.job import Job, await_unit
from kvps.machine.files import private
from kvps.session.session import Session
from kvps_workers.contributions import Contributions
from kvps_workers.helper_processes import HelperProcesses
from kvps_workers.task import Task, load_task
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
    if not config.metadata.task:
        advice = f": start one more copy of its script, with KVPS_JOB={job.name}" if config.units else ""
        raise InvalidTask(
            f"job {job.name!r} has no task: it was made in Python, and its workers join from there{advice}"
        )
    if (procs := config.metadata.procs) > 1 and device is not CPU:
        raise InvalidSetting(
            f"procs={procs} is for workers on the CPU, and this one is on {device.name}: create the job with procs=1"
        )
    if config.takes_local_steps:
        raise InvalidSetting(
            f"job {job.name!r} takes {config.local_steps} local steps, and a task's worker pushes each gradient: train "
            f"it in a script, with kvps.torch and inner="
        )
    if slow < 1:
        raise InvalidSetting(f"slow must be 1 or more, not {slow:g}")
    task = load_task(config.metadata.task)
    acknowledged = 0
    while True:
        try:
            with job.join(worker, device=device, prefetch=prefetch) as session:
                worker = session.worker
                log.info("job %s: joined as %s, rank %d, on %s", job.name, worker, session.rank, device.name)
                if session.clock < acknowledged:
                    lost = acknowledged - session.clock
                    what = counted(lost, "acknowledged contribution")
                    log.warning("job %s: the server lost %s of %s", job.name, what, worker)
                try:
                    _work(job, session, task, device, slow, acks)
                finally:
                    acknowledged = session.clock
        except WorkerEvicted as error:
            # It was silent for too long, or the server was restarted. If another process has the id now, join raises.
            log.warning("%s", error)
            continue
        if not config.units or config.unit_rounds or not await_unit(job):
            return


def _work(job: Job, session: Session, task: Task, device: Device, slow: float, acks: Path | None) -> None:
    """Pull, compute and push until no batch is left for this worker; then leave."""
    contributions = Contributions(job.config, job.layout, task, session.rank, device.xp)
    try:
        _do_rounds(job, session, contributions, slow, acks)
    except JobStopped as stopped:
        log.info("%s", stopped)
    except BaseException:
        with suppress(KvpsError):  # the user must see the first error
            session.leave(finished=False)
        raise
    else:
        _log_undone(session, contributions.rounds.total)
    session.leave()


def _do_rounds(job: Job, session: Session, contributions: Contributions, slow: float, acks: Path | None) -> None:
    with WaitReporter(job, session) as patience, ExitStack() as stack:
        compute = contributions.compute
        if job.config.metadata.procs > 1:
            compute = stack.enter_context(HelperProcesses(contributions)).compute
        while True:
            with patience.waiting():
                number = _next(session, contributions.rounds.total)
            if number is None:
                return
            with patience.waiting():
                params = session.pull()
            # If the job has made that round without this worker, another one is next.
            is_over = not job.config.units and session.round > number
            if is_over and (number := _next(session, contributions.rounds.total)) is None:
                return
            began = time.perf_counter()
            loss, grads = compute(params, number)
            began = _stretch(began, slow)
            with patience.waiting():
                counts = _push(session, grads, loss, contributions.weight(number))
            if counts and acks:
                with open(acks, "a", opener=private) as file:  # one write a line: a kill cuts the last line at most
                    file.write(f"{session.worker} {session.incarnation} {session.sequence}\n")
            _stretch(began, slow)


def _next(session: Session, rounds: int) -> int | None:
    """Return the number of a session's next contribution, of so many; None if there is none for it. Raises what
    `Session.next_unit` raises."""
    if session.config.units:
        return session.next_unit()
    return session.round if session.round < rounds else None


def _log_undone(session: Session, rounds: int) -> None:
    """Log how much of this worker's data is in no version, because rounds were made without it."""
    undone = rounds - session.clock
    if session.config.partial_rounds and not session.config.units and undone > 0:
        log.info(
            "worker %s has %s of its %s in no version: a quorum went on without it",
            session.worker,
            f"{undone:,}",
            counted(rounds, "round"),
        )


def _push(session: Session, grads: Mapping[str, Any], loss: float, weight: int | None) -> bool:
    """Push, and try again while the server's memory is full: commits of others, or an operator, make room. Return False
    if it does not count: it came late and was dropped, or another worker has pushed the same unit before."""
    while True:
        try:
            before = session.duplicates
            session.push(grads, loss, weight)
            return session.duplicates == before
        except ContributionLate as late:
            log.debug("%s", late)
            return False
        except ServerFull as full:
            log.warning("%s; tries again", full)


def _stretch(began: float, slow: float) -> float:
    """Make what has taken place since `began` take as long as on a machine so many times as slow. Return when that was
    over."""
    if slow > 1:
        time.sleep((slow - 1) * (time.perf_counter() - began))
    return time.perf_counter()
