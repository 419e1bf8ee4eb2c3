"""`kvps run --resume`: finds what a run goes on from: its jobs on the server, their newest checkpoints, or nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from kvps.config import JobConfig, UncheckedConfig
from kvps.errors import InvalidSetting, JobNotFound, UsageError, counted
from kvps.history.checkpoint import Checkpoint
from kvps.history.checkpoint_directory import Newest, ended_file, jobs_in, newest, passed_over
from kvps.job import Job, readable
from kvps.launch import other_settings
from kvps.machine import process
from kvps.machine.launcher import Launcher
from kvps.parsing import number
from kvps.protocol.job_state import Member, State
from kvps.protocol.run_control import RunControl
from kvps.run_jobs import Run, names_of, run_of
from kvps.store import Store, fresh_id
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
    """Where a run begins: `run` is its name and id, `lines` say what it goes on from, and the jobs that are `done` have
    nothing left to train: its copies pass through them."""

    run: Run
    lines: Sequence[str] = ()
    done: Collection[str] = ()


def origin(store: Store, name: str, launch: Launch) -> Origin:
    """Find the jobs of a run that is to go on, and make them ready for its copies.

    Raises UsageError if other processes train one of them, InvalidSetting if it has other settings, CorruptData.
    """
    there = {job.name: job for job in _on_server(store, name)}
    saved = _saved(launch.directory, name, there) if launch.directory else {}
    first = next(iter(there.values()), None)
    run = Run.holding(name, first.name, first.id) if first else Run(name, fresh_id())
    lines, done = [], set[str]()
    for each in names_of(name, [*there, *saved]):
        if job := there.get(each):
            if job.id != run.job_id(each):
                raise UsageError(f"job {each!r} is of another run than {first and first.name!r}: kvps rm {each}")
            line, finished = _adopted(store, job, launch)
        else:
            line, finished = _restored(store, each, saved[each], launch, run.job_id(each))
        lines.append(line)
        done |= {each} if finished else set()
    if not lines:
        where = f" and no checkpoint of it in {launch.directory}" if launch.directory else ""
        lines.append(f"job {name}: begins anew: there is no job of that name on the server{where}")
    return Origin(run, lines, done)


def ended(store: Store, name: str, launch: Launch) -> list[str]:
    """Return the lines about a run that has made its last job and finished all; none if it has anything left to do."""
    there = list(_on_server(store, name))
    if there:
        last = there[-1].access
        states = [(job.name, job.state(), job.config) for job in there]
        over = last.client.call("GET", last.keys.last) == "0" and all(state.finished(of) for _, state, of in states)
        return [_finished(job, state.version, state.run, " on the server") for job, state, _ in states if over]
    if not launch.directory or not any(launch.directory.glob(f"{name}.*.ended")):
        return []  # without reading a checkpoint
    checkpoints = [(found.checkpoint, found.path) for found in _saved(launch.directory, name, ()).values()]
    if not all(checkpoint.finished for checkpoint, _ in checkpoints):
        return []
    runs = {Run.holding(name, checkpoint.job, checkpoint.id) for checkpoint, _ in checkpoints}
    over = any(ended_file(launch.directory, *run).exists() for run in runs)
    return [_finished(c.job, c.version, c.run, f" in {path}") for c, path in checkpoints if over]


def _on_server(store: Store, run: str) -> Iterator[Job]:
    """Yield the jobs of a run that are on the server."""
    for name in names_of(run, store.jobs()):
        with suppress(JobNotFound), readable(name):
            job = store.job(name)
            if name == run or run_of(job.config) == run:
                yield job


def _saved(directory: Path, run: str, there: Container[str]) -> dict[str, Newest]:
    """Return the newest checkpoint of each job of a run that is not `there`."""
    found = {name: newest(directory, name) for name in names_of(run, jobs_in(directory)) if name not in there}
    return {n: f for n, f in found.items() if f and (n == run or run_of(f.checkpoint.config) == run)}


def _finished(name: str, version: int, run: RunControl, where: str) -> str:
    why = f" ({run.why})" if run.ends else ""
    return f"job {name}: finished at version {version}{where}{why}: nothing is left to train"


def _goes_on(job: Job, version: int, run: RunControl, where: str) -> str:
    """Return the line about a job that goes on. Only a stop stays: a run that is resumed is neither suspended nor
    paused."""
    until = f"; {ending(job.config, run)}" if run.state == "stopped" else ""
    return f"job {job.name}: goes on at version {version}, from {where}{until}"


# -- the job on the server ------------------------------------------------------------------------------------------


def _adopted(store: Store, job: Job, launch: Launch) -> tuple[str, bool]:
    """Have the job on the server wait for the copies of this run, which take the places of those of an earlier one.
    Return the line about it, and whether it is finished."""
    config, name, state = job.config, job.name, job.state()
    noted, launched, me = config.metadata, config.metadata.launcher, Launcher.of(launch.launched_by)
    if noted.task and (launched is None or launched.command != me.command):
        raise UsageError(
            f"job {name!r} trains the task {noted.task}: kvps worker --job {name} goes on with it; give this run "
            f"another name (--job NAME)"
        )
    check_fits(name, config, launch)
    if launched and not launched.is_dead and not launched.is_elsewhere:
        raise UsageError(f"{launched} trains job {name!r}: wait for its end, or end it with kill {launched.pid}")
    finished = state.finished(config)
    ended, whose = list[Member](), launched or "processes that kvps run did not start"
    if not finished:
        among = partial(_keeping_places, job, launched=launched)
        ended = await_ended(job, among, whose, "the earlier run", launch.grace_s)
    if config.unit_rounds:  # nobody waits for anybody: their units go to whoever comes
        for member in ended:
            if member.state != "gone":
                job.evict(member, "the command that launched it has ended")
        ended = []
    incarnations = {member.worker: member.incarnation for member in ended}
    adopt = partial(job.access.scripts.adopt, noted.launched_by, launch.launched_by, str(me), incarnations)
    if not job.access.in_present_history(adopt):
        raise UsageError(f"another command has just resumed job {name!r}")
    job.access.client.call("DEL", job.access.keys.last)
    if state.run.state in ("suspended", "paused"):
        job.resume("kvps run --resume")
    if finished:
        return _finished(name, state.version, state.run, " on the server"), True
    _dismiss_missing(job, launch)
    return _goes_on(job, state.version, state.run, "the job on the server"), False


def _keeping_places(job: Job, state: State, launched: Launcher | None) -> list[Member]:
    """Return the workers of an earlier run that keep their places.

    One that failed or was evicted keeps its place where it has data of its own and is started again, or the first copy
    that is back would train without it.
    """
    members = state.members.values()
    if job.config.units:
        ours = [m for m in members if m.state in ("active", "rejoining") or m.worker in state.on_leave]
    else:
        ours = [m for m in members if not (m.finished or (m.evicted and launched is None))]
    if launched and launched.most:
        ours = [m for m in ours if m.worker in {f"w{rank}" for rank in range(launched.most)}]
    return ours


def await_ended(
    job: Job, among: Callable[[State], list[Member]], whose: object, earlier: str, grace_s: float = 0.0
) -> list[Member]:
    """Wait until no process `among` the workers of a job is at work, and return these workers. Raises UsageError, which
    says `whose` they are, if some do not end.

    A process of another machine has ended if it was silent for the worker timeout.
    """
    timeout_s = job.config.worker_timeout_ms / 1000
    end, announced = time.monotonic() + max(timeout_s + 1, grace_s), False
    while True:
        members = among(job.state())
        there = ", ".join(sorted(m.worker for m in members if m.active and _lives(job, m, timeout_s)))
        if not there:
            return members
        if time.monotonic() > end:
            raise UsageError(f"job {job.name!r}: {there} of {whose} are at work: wait for their end, or end them")
        if not announced:
            say(f"job {job.name}: waits until {there} of {earlier} have ended")
            announced = True
        time.sleep(_POLL_S)  # the end of a process that is no child of this one gives no sign


def _lives(job: Job, member: Member, timeout_s: float) -> bool:
    """Return whether the process of a worker is there, or may be."""
    if process.is_dead(member.process):
        return False
    seen = job.access.client.call("ZSCORE", job.access.keys.heartbeat, member.worker)
    silent_s = job.access.server.seconds() - number(seen or 0, "the time of a sign of life") / 1000
    return silent_s <= timeout_s


# -- a checkpoint ---------------------------------------------------------------------------------------------------


def _restored(store: Store, name: str, found: Newest, launch: Launch, id: str) -> tuple[str, bool]:
    """Create the job of a checkpoint for the copies of this run. Return the line about it, and whether it is
    finished."""
    checkpoint, path = found.checkpoint, found.path
    if found.damaged:
        say(passed_over(found))
    job = restored(store, name, checkpoint, launch, id)
    if checkpoint.finished:
        return _finished(name, checkpoint.version, checkpoint.run, f" in {path}"), True
    return _goes_on(job, checkpoint.version, checkpoint.run, str(path)), False


def restored(
    store: Store,
    name: str,
    checkpoint: Checkpoint,
    launch: Launch,
    id: str | None = None,
    before: JobConfig | None = None,
) -> Job:
    """Create the job of a checkpoint for the copies of this run. `before` are the settings of the checkpoint's job, if
    this one has others."""
    before = before or checkpoint.config
    if checkpoint.config.units:  # any number of workers divides what is left
        workers = replace(checkpoint.config, workers=launch.workers)
        checkpoint = replace(checkpoint, config=workers)
    check_fits(name, checkpoint.config, launch)
    with storing(store, checkpoint.layout.nbytes * (1 + len(checkpoint.slots)), launch.quiet):
        job = store.restore_job(checkpoint, name, launched_by=launch.launched_by, before=before, id=id)
    if not checkpoint.finished:
        _dismiss_missing(job, launch)
    return job


def _dismiss_missing(job: Job, launch: Launch) -> None:
    """Have nobody wait for workers whose copies are not started again, where others may do their work."""
    if job.config.units:
        for member in job.state().members.values():
            if member.state == "rejoining" and member.worker not in launch.ids:
                job.evict(member, "the run goes on without it")


# -- the settings ---------------------------------------------------------------------------------------------------


def check_fits(name: str, config: JobConfig, launch: Launch) -> None:
    """Raise InvalidSetting if a job cannot go on with the copies of this run, or has not the settings that were
    given."""
    if config.metadata.publishes:
        raise InvalidSetting(
            f"job {name!r} has no workers: its learner goes on with it by Store.publisher, after kvps checkpoint "
            f"restore if it is only in a file; give this run another name (--job NAME)"
        )
    if not config.units and {launch.workers, launch.most} != {config.workers}:
        raise InvalidSetting(
            f"job {name!r} has {counted(config.workers, 'worker')}, each with its own part of the data, and would "
            f"wait for those that are missing: give -w {config.workers}. A job that hands out units goes on with any "
            f"number"
        )
    asked = UncheckedConfig(**launch.given)
    if differing := config.differing(asked, launch.given):
        raise InvalidSetting(other_settings(name, config, asked, differing))
