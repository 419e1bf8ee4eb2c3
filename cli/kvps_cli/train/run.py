"""`kvps run`: starts server, aggregator and copies of a user's script, and watches them until all have ended."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from kvps import launch as launch_variables
from kvps.errors import InvalidSetting, KvpsError
from kvps.history.checkpoint_directory import note_end
from kvps.job import Job
from kvps.protocol.answers import job_exists
from kvps.run_jobs import LONGEST_RUN, Run, names_of
from kvps.store import Store, fresh_id
from kvps_cli import connect, options
from kvps_cli.child import SUSPENDED, Child
from kvps_cli.finished_runs import make_room
from kvps_cli.output import log_options, say, start_log, surviving_its_reader
from kvps_cli.supervise import Care, Supervisor
from kvps_cli.train.after import is_saved, what_stays
from kvps_cli.train.evaluator import EvaluatorOptions, EvaluatorProcess
from kvps_cli.train.further import further
from kvps_cli.train.hosts import Line, Place, check_hosts, placed
from kvps_cli.train.jobs_of_run import JobsOfRun, Served, check_run_name, finder
from kvps_cli.train.kept_files import KeptFiles
from kvps_cli.train.learner import Parts, check_options, run_learner
from kvps_cli.train.lifetime import Lifetime
from kvps_cli.train.progress import (
    POLL_S,
    Followed,
    aggregators_option,
    check_killed,
    check_trained,
    finish,
    follow,
    relay,
)
from kvps_cli.train.resume import Launch, Origin, ended, origin
from kvps_cli.train.scale import Copies
from kvps_cli.train.settings import JobOptions
from kvps_cli.train.stop import Stop, keep

_LAST_S = 5.0  # for the other copies, when the first has ended without making the job


@options.with_shared
def run(
    settings: JobOptions,
    kept: KeptFiles,
    evaluation: EvaluatorOptions,
    life: Lifetime,
    server: connect.RunServerOptions,
    command: Annotated[
        list[str] | None, typer.Argument(metavar="COMMAND...", help="What to run, as in: python train.py --rounds 500")
    ] = None,
    job: Annotated[
        str | None, typer.Option("--job", metavar="NAME", help="Name of the job.", show_default="the script's")
    ] = None,
    learner: Annotated[
        str | None,
        typer.Option(
            metavar="COMMAND",
            help="Run this command as the learner that publishes a job, and COMMAND... as its actors, -w of them.",
        ),
    ] = None,
    aggregators: Annotated[int, aggregators_option()] = 1,
    hosts: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=1,
            help="How many hosts share the copies. Give the same line on each: each starts its part. Needs --redis.",
        ),
    ] = 1,
    quiet: options.Quiet = False,
    verbose: options.Verbose = 0,
) -> None:
    """Run copies of your own script as the workers of one job, as torchrun does for DDP.

    The script calls kvps.from_env() and creates the job. Settings given here apply to that job.
    What the copies write to stdout and to stderr goes there, and messages of kvps go to stderr.
    """
    line = Line.of(settings.workers, hosts, settings.given, command)
    check_hosts(line, settings.most, server.redis)
    command = _checked(command or [])
    check_run_name(job or "run")
    life.check(kept, server)
    kept.prepare(fresh=not life.resume, resumable=life.resume)
    evaluation.prepare(kept.kept_log.directory, _checked)
    if learner is not None:
        check_options(hosts, aggregators, settings, kept, evaluation)
        named = partial(_name, job=job, command=shlex.split(learner), resume=life.resume, hosts=1, quiet=quiet)
        run_learner(server, named, Parts.of(learner, command, settings, _checked), kept, life, (quiet, verbose))
        return
    given = {name: value for name, value in settings.given.items() if name != "workers"}
    settings.check_each()
    quiet = start_log(quiet, verbose)
    with connect.serving_store(server, quiet, joinable=False) as store:
        name, directory = _name(store, job, command, life.resume, hosts, quiet), kept.kept_log.directory
        launch = Launch("", settings.workers, settings.most, given, directory, life.stop_grace, quiet)
        begin = partial(_begin, store, name, launch, life.resume, partial(further, command, kept))
        with (
            placed(store, name, line, settings.most, begin) as place,
            Stop(possible=life.resume or directory is not None) as stop,
        ):
            care = life.care(settings.most > 1, log_options(quiet, verbose))
            supervised = _Run(store, Run(name, place.id), launch, place, kept, care)
            with supervised.evaluated(evaluation, command) as evaluator:
                jobs, copies = supervised.train(command, aggregators, stop, evaluator)
            if supervised.stopped:
                again = "" if life.resume else f" with --resume --job {name}"
                version = jobs[-1].state().version if jobs else 0
                of_job = f" of job {jobs[-1].name}" if len(jobs) > 1 else ""
                with surviving_its_reader(stop.asked):
                    say(f"stopped at version {version}{of_job}, can be resumed: the same command{again} goes on")
                raise typer.Exit(SUSPENDED)
        if not jobs:
            if failed := ", ".join(copy.name for copy in copies if copy.failed):
                raise KvpsError(f"the run ends: {failed} failed before a job was made")
            why = "no job of workers was made: a script that trains calls kvps.from_env() and its create_job"
            if any(copy.code for copy in copies):
                raise KvpsError(f"the first copy ended, and {why} in all copies")
            say(f"all copies ended, and {why}")  # it has done what it was asked for, as with --help
            return
        versions = {each.name: each.state().version for each in jobs}
        fresh = [each.name for each in jobs if versions[each.name] and each.name not in supervised.done]
        if server.stays_s and fresh and not quiet and (stays := what_stays(store, fresh[-1], kept.saving)):
            say(stays)
        finished = all(each.state().finished(each.config) for each in jobs)
        if finished and not copies[0].code and directory and not place.number:
            note_end(directory, name, place.id)
        unsaved = [each for each in fresh if kept.saving and place.leads and not is_saved(store, each, kept.saving)]
    for each, version in versions.items():
        check_trained(each, version, copies)
    check_killed(jobs[-1].name, copies)
    for each in unsaved:
        raise KvpsError(f"job {each}: its last version, {versions[each]}, could not be written to {directory}")


def _name(store: Store, job: str | None, command: Sequence[str], resume: bool, hosts: int, quiet: bool) -> str:
    """Return the name of the run, for whose jobs room is made. Raises InvalidName."""
    wished = job or _name_of(command)
    make_room(store, quiet, spared=wished if resume else "")
    if job or resume or hosts > 1:
        return check_run_name(wished)
    return store.free_name(wished[: LONGEST_RUN - 4])


def _begin(
    store: Store,
    name: str,
    launch: Launch,
    resume: bool,
    further: Callable[[Store, str, Launch], Origin | None],
    launched_by: str,
) -> str:
    """Begin a run, and return its id. A job that is finished may go `further`. Raises JobExists, what `origin` and
    `further` raise, and Exit if nothing is left to do."""
    if resume:
        launch = launch._replace(launched_by=launched_by)
        begin = further(store, name, launch)
        over = [] if begin else ended(store, name, launch)
        if not over:
            begin = begin or origin(store, name, launch)
        for line in () if launch.quiet else over or (begin.lines if begin else ()):
            say(line)
        if begin is None:
            raise typer.Exit
        return begin.run.id
    for taken in names_of(name, store.jobs()):
        if taken == name or taken.rpartition(".")[2].isdecimal():
            raise job_exists(taken)
    return fresh_id()


def _checked(command: Sequence[str]) -> list[str]:
    """Return the command with the full path of its program, which for a file that ends in .py is this Python. Raises
    InvalidSetting if there is no such program or file."""
    if not command:
        raise InvalidSetting("there is nothing to run: give a script or a command, as in kvps run -w 4 train.py")
    is_script = Path(command[0]).suffix == ".py"
    if is_script and Path(command[0]).is_file():
        return [sys.executable, *command]
    program = shutil.which(command[0])
    if program is None:
        raise InvalidSetting(f"there is no {'file' if is_script else 'program'} {command[0]!r} to run")
    return [program, *command[1:]]


def _name_of(command: Sequence[str]) -> str:
    """Return the name of the job that a command trains: train for python -u sub/train.py."""
    scripts = [word for word in command if word.endswith(".py")] or command
    return re.sub(r"[^A-Za-z0-9_-]+", "-", Path(scripts[0]).stem).strip("-") or "run"


class _Run:
    """One run of copies of a script.

    stopped  whether the copies ended because the run stops, to be resumed another time
    """

    def __init__(self, store: Store, run: Run, launch: Launch, place: Place, kept: KeptFiles, care: Care) -> None:
        self.stopped = False
        self.done = {job.name for job in run.jobs(store) if job.state().finished(job.config)}
        self._store, self._run, self._place = store, run, place
        self._launch, self._kept, self._care = launch, kept, care
        if place.number:  # the first host writes for all
            kept.targets = []

    def _supervisor(self) -> Supervisor:
        return Supervisor(self._store, self._place.launched_by, finder(self._store, self._run), self._care)

    @contextmanager
    def evaluated(self, evaluation: EvaluatorOptions, command: Sequence[str]) -> Iterator[EvaluatorProcess | None]:
        """Evaluate the versions of the jobs that are trained inside the block, if that is wanted."""
        if evaluation.orders is None or self._place.number:
            yield None
            return
        launch = self._launch
        environment = launch_variables.of_evaluator(evaluation.orders, launch.workers, *self._run, launch.given)
        with EvaluatorProcess(self._supervisor(), evaluation, command, environment) as evaluator:
            yield evaluator

    def train(
        self, command: Sequence[str], aggregators: int, stop: Stop, evaluator: EvaluatorProcess | None
    ) -> tuple[list[Job], list[Child]]:
        """Run the copies until they have ended; a job waits for `workers` of them. Return the jobs that they made, and
        the copies."""
        launch, copies = self._launch, list[Child]()
        supervisor = self._supervisor()
        try:
            served = Served(aggregators, self._kept, launch.quiet)
            with JobsOfRun(supervisor, self._run, served, self.done) as jobs:
                for rank in self._place.ranks:
                    # Otherwise Python keeps its output in a buffer, because stdout is a pipe.
                    environment = {"PYTHONUNBUFFERED": "1"}
                    environment |= launch_variables.of_copy(rank, launch.workers, *self._run, launch.given)
                    copies.append(supervisor.run(f"w{rank}", command, environment))
                if not self._job_made(supervisor, copies, stop):
                    self.stopped = stop.asked
                    return [], copies
                scaled = Copies(supervisor, copies, min(launch.workers, len(copies)), stop)
                followed = partial(jobs.followed, None if self._place.number else copies[0])
                follow(supervisor, followed, scaled)
                self._end(followed(), copies, stop, evaluator)
            with surviving_its_reader(stop.asked):
                finish(supervisor, followed())
                jobs.show_figures()
            return list(supervisor.jobs()), copies
        finally:
            supervisor.end()
            with surviving_its_reader(stop.asked):
                relay(supervisor.new_lines())

    def _end(
        self, jobs: Sequence[Followed], copies: Sequence[Child], stop: Stop, evaluator: EvaluatorProcess | None
    ) -> None:
        """Wait for the evaluations of what is finished, and write down what is not."""
        rest = [each.job for each in jobs if not each.over]
        ended = all(copy.code == 0 for copy in copies)
        self.stopped = any(copy.suspended for copy in copies) or (stop.asked and not (ended and not rest))
        if evaluator and not rest and not self.stopped:
            evaluator.await_last(self._launch.quiet, lambda: stop.asked)
        for job in rest:  # if a copy failed, no aggregator writes the last version
            if self._place.leads and (self.stopped or (self._kept.saving and job.state().version)):
                keep(job, self._kept, self._launch.quiet)

    @staticmethod
    def _job_made(supervisor: Supervisor, copies: Sequence[Child], stop: Stop) -> bool:
        """Return whether there is a job, once the first copy has made it, or no copy can make it any more, or none is
        to."""
        while True:
            failed = any(copy.failed and copy.done for copy in copies)
            over = failed or copies[0].done
            if over and not failed:  # the other copies wait for the job, or are about to end too
                supervisor.await_end([copy.name for copy in copies], _LAST_S)
            there = bool(supervisor.jobs())  # looked up after the ends: a copy that ended may have made it
            if there or over or stop.asked:
                return there
            supervisor.watch(POLL_S)
            # A short run may be over at the first look at it, and its figures come before its last lines.
            lines = supervisor.waiting_lines
            if not supervisor.jobs():
                relay(supervisor.new_lines(lines))
