"""`kvps run --resume`: finds what a run goes on from: the job on the server, its newest checkpoint, or nothing."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from kvps.config import JobConfig, UncheckedConfig
from kvps.errors import InvalidSetting, JobNotFound, UsageError, counted
from kvps.history.checkpoint import Checkpoint
from kvps.history.checkpoint_directory import newest, passed_over
from kvps.job import Job, readable
from kvps.launch import other_settings
from kvps.machine import process
from kvps.machine.launcher import Launcher
from kvps.parsing import number
from kvps.protocol.job_state import Member
from kvps.protocol.run_control import RunControl
from kvps.store import Store
from kvps_cli.new_job import storing
from kvps_cli.output import say
from kvps_cli.train.control import ending

_POLL_S = 0.2


class Launch(NamedTuple):
    """A run that is about to start its copies.

    launched_by  the text by which its job knows it
    workers      the number of copies, or MIN of MIN:MAX
    most         the number of copies, or MAX
    given        the settings that its command line gives, with the names of JobConfig
    directory    where its checkpoints are; None if it has none
    grace_s      for how long it waits until processes of an earlier run have ended
    quiet        whether only results and errors are printed
    """

    launched_by: str
    workers: int
    most: int
    given: Mapping[str, Any]
    directory: Path | None
    grace_s: float
    quiet: bool

    @property
    def ids(self) -> list[str]:
        """The workers that its copies are."""
        return [f"w{rank}" for rank in range(self.most)]


class Origin(NamedTuple):
    """Where a run begins: with a job that goes on, or without one, which its copies are to make. `line` says which; a
    job that is `finished` has nothing left to train."""

    job: Job | None
    line: str
    finished: bool = False


def origin(store: Store, name: str, launch: Launch) -> Origin:
    """Find what a run of the job `name` goes on from, and make it ready for the run's copies.

    Raises UsageError if other processes train that job, InvalidSetting if it has other settings, CorruptData.
    """
    try:
        with readable(name):
            job = store.job(name)
            return _adopted(store, job, launch)
    except JobNotFound:
        found = newest(launch.directory, name) if launch.directory else None
    if found is None:
        where = f" and no checkpoint of it in {launch.directory}" if launch.directory else ""
        return Origin(None, f"job {name}: begins anew: there is no job of that name on the server{where}")
    if found.damaged:
        say(passed_over(found))
    checkpoint, path = found.checkpoint, found.path
    if checkpoint.finished:
        return Origin(None, _finished(name, checkpoint.version, checkpoint.run, f" in {path}"), finished=True)
    job = restored(store, name, checkpoint, launch)
    return Origin(job, _goes_on(job, checkpoint.version, checkpoint.run, str(path)))


def _finished(name: str, version: int, run: RunControl, where: str) -> str:
    why = f" ({run.why})" if run.ends else ""
    return f"job {name}: finished at version {version}{where}{why}: nothing is left to train"


def _goes_on(job: Job, version: int, run: RunControl, where: str) -> str:
    """Return the line about a job that goes on. Only a stop stays: a run that is resumed is neither suspended nor
    paused."""
    until = f"; {ending(job.config, run)}" if run.state == "stopped" else ""
    return f"job {job.name}: goes on at version {version}, from {where}{until}"


# -- the job on the server ------------------------------------------------------------------------------------------


def _adopted(store: Store, job: Job, launch: Launch) -> Origin:
    """Have the job on the server wait for the copies of this run, which take the places of those of an earlier one."""
    config, name, state = job.config, job.name, job.state()
    launched = Launcher.of(config.launched_by) if config.launched_by else None
    me = Launcher.of(launch.launched_by)
    if config.task and (launched is None or launched.command != me.command):  # a script may name a task, too
        raise UsageError(
            f"job {name!r} trains the task {config.task}: kvps worker --job {name} goes on with it; give this run "
            f"another name (--job NAME)"
        )
    if state.finished(config):
        return Origin(job, _finished(name, state.version, state.run, " on the server"), finished=True)
    _check(job, launch)
    if launched and not launched.is_dead and not launched.is_elsewhere:
        raise UsageError(f"{launched} trains job {name!r}: wait for its end, or end it with kill {launched.pid}")
    ended = _await_ended(job, launched, launch.grace_s)
    if config.unit_rounds:  # nobody waits for anybody: their units go to whoever comes
        for member in ended:
            if member.state != "gone":
                job.evict(member, "the command that launched it has ended")
        ended = []
    incarnations = {member.worker: member.incarnation for member in ended}
    scripts = job.access.scripts
    if not job.in_present_history(lambda: scripts.adopt(config.launched_by, launch.launched_by, str(me), incarnations)):
        raise UsageError(f"another command has just resumed job {name!r}")
    if state.run.state in ("suspended", "paused"):
        job.resume("kvps run --resume")
    _dismiss_missing(job, launch)
    return Origin(store.job(name), _goes_on(job, state.version, state.run, "the job on the server"))


def _await_ended(job: Job, launched: Launcher | None, grace_s: float) -> list[Member]:
    """Wait until no process of the earlier run is at work, and return the workers that keep their places. Raises
    UsageError if some do not end.

    One that failed or was evicted keeps its place where it has data of its own and is started again, or the first copy
    that is back would train without it.
    A process of another machine has ended if it was silent for the worker timeout.
    """
    timeout_s = job.config.worker_timeout_ms / 1000
    end, announced = time.monotonic() + max(timeout_s + 1, grace_s), False
    while True:
        state = job.state()
        if job.config.units:
            ours = [
                m for m in state.members.values() if m.state in ("active", "rejoining") or m.worker in state.on_leave
            ]
        else:
            ours = [m for m in state.members.values() if not (m.finished or (m.evicted and launched is None))]
        if launched and launched.most:
            ours = [m for m in ours if m.worker in {f"w{rank}" for rank in range(launched.most)}]
        there = ", ".join(sorted(m.worker for m in ours if m.active and lives(job, m, timeout_s)))
        if not there:
            return ours
        if time.monotonic() > end:
            whose = launched or "processes that kvps run did not start"
            raise UsageError(f"job {job.name!r}: {there} of {whose} are at work: wait for their end, or end them")
        if not announced:
            say(f"job {job.name}: waits until {there} of the earlier run have ended")
            announced = True
        time.sleep(_POLL_S)  # the end of a process that is no child of this one gives no sign


def lives(job: Job, member: Member, timeout_s: float) -> bool:
    """Return whether the process of a worker is there, or may be."""
    if process.is_dead(member.process):
        return False
    seen = job.access.client.call("ZSCORE", job.access.keys.heartbeat, member.worker)
    silent_s = job.access.server.seconds() - number(seen or 0, "the time of a sign of life") / 1000
    return silent_s <= timeout_s


# -- a checkpoint ---------------------------------------------------------------------------------------------------


def restored(store: Store, name: str, checkpoint: Checkpoint, launch: Launch, before: JobConfig | None = None) -> Job:
    """Create the job of a checkpoint for the copies of this run. `before` are the settings of the checkpoint's job, if
    this one has others."""
    before = before or checkpoint.config
    if checkpoint.config.units:  # any number of workers divides what is left
        workers = replace(checkpoint.config, workers=launch.workers)
        checkpoint = replace(checkpoint, config=workers)
    _check(_Stored(name, checkpoint.config), launch)
    with storing(store, checkpoint.layout.nbytes * (1 + len(checkpoint.slots)), launch.quiet):
        job = store.restore_job(checkpoint, name, launched_by=launch.launched_by, before=before)
    _dismiss_missing(job, launch)
    return job


def _dismiss_missing(job: Job, launch: Launch) -> None:
    """Have nobody wait for workers whose copies are not started again, where others may do their work."""
    if job.config.units:
        for member in job.state().members.values():
            if member.state == "rejoining" and member.worker not in launch.ids:
                job.evict(member, "the run goes on without it")


# -- the settings ---------------------------------------------------------------------------------------------------


class _Stored(NamedTuple):
    """A job that is to be restored."""

    name: str
    config: JobConfig


def _check(job: Job | _Stored, launch: Launch) -> None:
    """Raise InvalidSetting if a job cannot go on with the copies of this run, or has not the settings that were
    given."""
    config = job.config
    if not config.units and {launch.workers, launch.most} != {config.workers}:
        raise InvalidSetting(
            f"job {job.name!r} has {counted(config.workers, 'worker')}, each with its own part of the data, and would "
            f"wait for those that are missing: give -w {config.workers}. A job that hands out units goes on with any "
            f"number"
        )
    asked = UncheckedConfig(**launch.given)
    if differing := config.differing(asked, launch.given):
        raise InvalidSetting(other_settings(job.name, config, asked, differing))
