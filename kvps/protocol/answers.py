"""The answers of the scripts, as values and errors."""

from __future__ import annotations

from typing import NamedTuple

from kvps.errors import ContributionLate, CorruptData, JobExists, JobNotFound, LeaseLost, WorkerEvicted
from kvps.protocol.plan import Plan
from kvps.protocol.run_control import RunControl


class Joined(NamedTuple):
    """The answer to a worker's join. `round` is the last round that the worker need not do any more; `residual` is the
    name of the residual that the last incarnation stored when it left, or ""; `state` is what the worker's user kept,
    as JSON, with the last contribution that was accepted, "" for nothing."""

    rank: int
    incarnation: str
    round: int
    clock: int
    pending: int
    residual: str
    state: str = ""


class Accepted(NamedTuple):
    """An acknowledged contribution: the clock it was acknowledged as, and its round. `more_units` says that a
    unit may be had at once."""

    clock: int
    round: int
    more_units: bool = True


class NextUnit(NamedTuple):
    """A unit of data for a worker. None says that none is free: in `backup_ms`, if that is not 0, one may be handed out
    a second time; or that all are `done`; or that the job `ends` for this worker."""

    unit: int | None
    backup_ms: int = 0
    done: bool = False
    ends: RunControl | None = None


class Planned(NamedTuple):
    """The committed version, the pin as JSON or "", and the open plan if there is one.

    `members` is the number of workers that are not gone: in the clock, or with contributions that still wait. After
    `grace_ms` a plan may be due though nothing more has come; 0 if that is not so.
    """

    version: int
    pin: str
    members: int
    plan: Plan | None
    waits_for_workers: bool
    grace_ms: int = 0


class Acquired(NamedTuple):
    """The term under which a shard was taken; "" if another aggregator, `holder`, has its lease.

    `future_ms` is 0 unless that lease had more time left than a lease lasts. Then it is that time: the server's clock
    was set back, and the lease now ends as if it was taken this moment.
    """

    term: str
    holder: str
    future_ms: int


class Evicted(NamedTuple):
    """The workers that were taken out of the vector clock. `future_ms` is how far the latest sign of life lay in the
    future: the server's clock was set back by about that much. A time in the future counts as now."""

    workers: list[str]
    future_ms: int


class CommitResult(NamedTuple):
    """The result of `ready`. If `flipped`, this call made the version visible, and `commit_id` is its log entry."""

    flipped: bool
    pin: str
    commit_id: str


class ServerRestarted(Exception):
    """The server was restarted and may have lost its last writes. The script changed nothing; see `recover`."""


class PlanGone(Exception):
    """The plan was committed or replaced in the meantime: read the open plan again."""


class UnitDone(ContributionLate):
    """Another worker, to which the unit was handed out too, has pushed it first, and that push counts."""


class RunOver(Exception):
    """The job was stopped or suspended, as `run` says, with an earlier round than that of the push."""

    def __init__(self, run: RunControl) -> None:
        super().__init__(run.why)
        self.run = run


class InboxFull(Exception):
    """The worker has as many waiting contributions as the job allows: wait for a commit."""


def job_not_found(job: str) -> JobNotFound:
    return JobNotFound(f"no job {job!r} on this server (any more): kvps jobs lists those there are")


def made_anew(job: str) -> JobNotFound:
    return JobNotFound(
        f"the job {job!r} that this process knew was removed, and another one has its name now: open that one anew"
    )


def being_removed(job: str) -> JobExists:
    return JobExists(f"job {job!r} is being removed: wait, or if that was cut short: kvps rm {job}")


def job_exists(job: str) -> JobExists:
    return JobExists(
        f"job {job!r} exists: go on with it (kvps run --resume, or kvps worker --job {job} for a task), or choose "
        f"another name; kvps rm {job} removes it and all that it has learned"
    )


def lease_lost(shard: int, job: str, holds: str) -> LeaseLost:
    return LeaseLost(f"lost shard {shard} of job {job!r}: another aggregator holds it (term {holds or 'none'})")


def evicted(worker: str, job: str, why: str) -> WorkerEvicted:
    return WorkerEvicted(
        f"worker {worker!r} is no longer in job {job!r} ({why}): what it had acknowledged counts, join again to go on"
    )


def damaged(key: str) -> CorruptData:
    return CorruptData(f"key {key} is damaged: another program, or another version of kvps, wrote there")
