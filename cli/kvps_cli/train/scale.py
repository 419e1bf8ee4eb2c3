"""How many workers of a job `kvps up` or `kvps run` keeps at work, and `kvps scale`, which changes that number.

The number is in a key of the job, with a time to live: the command that keeps the workers writes it, and reads it five
times a second. So `kvps scale`, which writes only where there is a number, is never heard by nobody.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated

import typer

from kvps.errors import InvalidSetting, KvpsError, UsageError, counted
from kvps.job import Job
from kvps.machine.launcher import Launcher
from kvps.parsing import whole
from kvps_cli import connect, options
from kvps_cli.child import Child
from kvps_cli.output import say
from kvps_cli.supervise import Supervisor
from kvps_cli.train.stop import Stop

_KEPT_MS = 10_000  # how long a number stays when nobody reads it any more
_POLL_S = 0.2
_NUMBER = "the number of workers to keep"


class Copies:
    """The processes that train a job, one for each worker that may be at work. All are started at first.

    all   the processes, by the ranks of their workers, also those that have ended or were asked to leave
    """

    def __init__(self, supervisor: Supervisor, all: Sequence[Child], least: int, stop: Stop | None = None) -> None:
        self.all = all
        self._stop = stop
        self._supervisor = supervisor
        self._least = least
        self._wanted = len(all)

    @property
    def stopping(self) -> bool:
        """Whether all copies are to end, to be resumed another time."""
        return self._stop is not None and self._stop.asked

    def over(self, jobs: Sequence[Job]) -> bool:
        """Return whether all copies have ended, and all that can be committed of what they pushed is."""
        if not all(child.done for child in self.all):
            return False
        states = [job.state() for job in jobs]
        return all(self._stop.over(state) if self._stop else state.settled for state in states)

    def follow(self, jobs: Sequence[Job]) -> None:
        """Start copies or ask some to leave if `kvps scale` was called since the last call, or all if a signal came.
        `jobs` are those at work; the first of them has the number."""
        if self._stop and self._stop.asked:
            self._stop.tell(self._supervisor, jobs)
            return
        if self._least == len(self.all) or not jobs:
            return
        job = jobs[0]
        client, key = job.access.client, job.access.keys.copies
        number, _ = client.together([("GET", key), ("PEXPIRE", key, _KEPT_MS)])
        if number is None:
            client.call("SET", key, self._wanted, "PX", _KEPT_MS)
            return
        wanted = whole(number, _NUMBER, self._least, len(self.all))
        if wanted != self._wanted:
            before, self._wanted = self._wanted, wanted
            self._scale(wanted)
            entry = ("kind", "scale", "workers", wanted, "before", before)
            client.call("XADD", job.access.keys.commits, "NOMKSTREAM", "*", *entry)

    def _scale(self, wanted: int) -> None:
        """Have `wanted` copies. The highest ranks leave first; the lowest come back first."""
        kept = [child for child in self.all if not child.done and not child.leaving]
        away = [child for child in self.all if child not in kept]
        for child in kept[wanted:]:
            self._supervisor.dismiss(child)
        for child in away[: max(0, wanted - len(kept))]:
            self._supervisor.recall(child)


def scale(
    job: options.JobName,
    workers: Annotated[int, typer.Argument(metavar="N", help="How many workers to keep, from MIN to MAX.")],
    redis: options.Redis = None,
) -> None:
    """Change how many workers a running job keeps.

    The kvps up or kvps run that trains it with --workers MIN:MAX starts more, or asks some to leave: what they were
    computing goes to others.
    """
    with connect.existing_job(redis, job) as opened:
        config = opened.config
        if config.metadata.publishes:
            raise UsageError(f"job {job!r} has no workers to keep: a learner publishes it")
        launched = config.metadata.launcher
        if launched is None or launched.is_dead:
            start = f": start more with {connect.start_of(opened)}" if config.units else ""
            raise UsageError(f"no kvps up or kvps run keeps the workers of job {job!r}{start}")
        if launched.most <= config.workers:
            raise UsageError(
                f"{launched} keeps {counted(config.workers, 'worker')} of job {job!r}: --workers MIN:MAX makes a job "
                f"whose number may change"
            )
        if not config.workers <= workers <= launched.most:
            raise InvalidSetting(
                f"{launched} keeps {config.workers} to {launched.most} workers of job {job!r}, not {workers}"
            )
        say(f"job {job}: {_change(_replaced(opened, launched, workers), workers)}")


def _replaced(job: Job, launched: Launcher, workers: int) -> int:
    """Write the number of workers in place of the one before, and return that one. Raises KvpsError if there is none.

    The workers of a new job may be at work before the command that keeps them has looked at the job.
    """
    client, key = job.access.client, job.access.keys.copies
    end = time.monotonic() + _KEPT_MS / 1000
    while True:
        before, written = client.together([("GET", key), ("SET", key, workers, "XX", "KEEPTTL")])
        if written:
            return whole(before, _NUMBER)
        if launched.is_dead or time.monotonic() > end:
            raise KvpsError(
                f"{launched} does not keep the workers of job {job.name!r} now: it has ended, or cannot be reached"
            )
        time.sleep(_POLL_S)


def _change(before: int, workers: int) -> str:
    if workers == before:
        return f"{counted(workers, 'worker')}, as before"
    more = workers - before
    what = f"{more} more {'starts' if more == 1 else 'start'}"
    if more < 0:
        what = f"{-more} {'is' if more == -1 else 'are'} asked to leave"
    return f"from {before} to {counted(workers, 'worker')}: {what}"
