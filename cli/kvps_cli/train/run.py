"""`kvps run`: starts server, aggregator and copies of a user's script, and watches them until all have ended."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from kvps import launch as launch_variables
from kvps.errors import InvalidSetting, JobNotFound, KvpsError
from kvps.job import Job
from kvps.protocol.answers import job_exists
from kvps.protocol.job_state import State
from kvps.protocol.keys import check_new_name
from kvps.store import Store, fresh_id
from kvps_cli import connect, options
from kvps_cli.child import SUSPENDED, Child
from kvps_cli.finished_runs import make_room
from kvps_cli.output import log_options, say, start_log
from kvps_cli.supervise import Care, Supervisor
from kvps_cli.train.after import is_saved, what_stays
from kvps_cli.train.evaluator import EvaluatorOptions, EvaluatorProcess
from kvps_cli.train.further import further
from kvps_cli.train.hosts import Line, Place, check_hosts, placed
from kvps_cli.train.kept_files import KeptFiles
from kvps_cli.train.lifetime import Lifetime
from kvps_cli.train.progress import (
    POLL_S,
    Display,
    Figures,
    aggregate,
    aggregators_option,
    check_killed,
    check_trained,
    finish,
    follow,
    relay,
)
from kvps_cli.train.resume import Launch, Origin, origin
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
    if job is not None:
        check_new_name("job", job)
    life.check(kept, server)
    kept.prepare(fresh=not life.resume, resumable=life.resume)
    evaluation.prepare(kept.kept_log.directory, _checked)
    given = {name: value for name, value in settings.given.items() if name != "workers"}
    settings.check_each()
    quiet = start_log(quiet, verbose)
    if settings.topology and not quiet:
        say(settings.topology)
    with connect.serving_store(server, quiet, joinable=False) as store:
        wished, directory = job or _name_of(command), kept.kept_log.directory
        make_room(store, quiet, spared=wished if life.resume else "")
        name = wished if job or life.resume or hosts > 1 else store.free_name(wished)
        launch = Launch("", settings.workers, settings.most, given, directory, life.stop_grace, quiet)
        begin = partial(_begin, store, name, launch, life.resume, partial(further, command, kept))
        with (
            placed(store, name, line, settings.most, begin) as place,
            Stop(possible=life.resume or directory is not None) as stop,
        ):
            care = life.care(settings.most > 1, log_options(quiet, verbose))
            supervised = _Run(store, name, launch, place, kept, care)
            with supervised.evaluated(evaluation, command) as evaluator:
                created, copies = supervised.train(command, aggregators, stop, evaluator)
            version = created.state().version if created else 0
            if supervised.stopped:
                again = "" if life.resume else f" with --resume --job {name}"
                say(f"stopped at version {version}, can be resumed: the same command{again} goes on")
                raise typer.Exit(SUSPENDED)
        if created is None:
            if failed := ", ".join(copy.name for copy in copies if copy.failed):
                raise KvpsError(f"the run ends: {failed} failed before a job was made")
            why = "no job was made: a script that trains calls kvps.from_env() and its create_job"
            if any(copy.code for copy in copies):
                raise KvpsError(f"the first copy ended, and {why} in all copies")
            say(f"all copies ended, and {why}")  # it has done what it was asked for, as with --help
            return
        if server.stays_s and version and not quiet and (stays := what_stays(store, name, kept.saving)):
            say(stays)
        saved = not (version and kept.saving and place.leads) or is_saved(store, name, kept.saving)
    check_trained(name, version, copies)
    check_killed(name, copies)
    if not saved:
        raise KvpsError(f"job {name}: its last version, {version}, could not be written to {directory}")


def _begin(
    store: Store,
    name: str,
    launch: Launch,
    resume: bool,
    further: Callable[[Store, str, Launch, Origin], Origin],
    launched_by: str,
) -> str:
    """Begin a run, and return its job's id. A job that is finished may go `further`. Raises
    JobExists, what `origin` and `further` raise, Exit if nothing is left to do."""
    if not resume:
        if name in store.jobs():
            raise job_exists(name)
        return fresh_id()
    launch = launch._replace(launched_by=launched_by)
    begin = origin(store, name, launch)
    if begin.finished:
        begin = further(store, name, launch, begin)
    if not launch.quiet:
        say(begin.line)
    if begin.finished:
        raise typer.Exit
    return begin.job.id if begin.job else fresh_id()


def _checked(command: Sequence[str]) -> list[str]:
    """Return the command with the full path of its program. Raises InvalidSetting if there is no such program."""
    if not command:
        raise InvalidSetting("there is nothing to run: give a command, as in kvps run -w 4 -- python train.py")
    program = shutil.which(command[0])
    if program is None:
        script = Path(command[0]).suffix == ".py"
        raise InvalidSetting(
            f"there is no program {command[0]!r} to run" + (f": try kvps run -- python {command[0]}" if script else "")
        )
    return [program, *command[1:]]


def _name_of(command: Sequence[str]) -> str:
    """Return the name of the job that a command trains: train for python -u sub/train.py."""
    scripts = [word for word in command if word.endswith(".py")] or command
    return re.sub(r"[^A-Za-z0-9_-]+", "-", Path(scripts[0]).stem).strip("-") or "run"


class _Run:
    """One run of copies of a script. Its job has an id of its own, so that another run's job is not mistaken for it.

    stopped  whether the copies ended because the run stops, to be resumed another time
    """

    def __init__(self, store: Store, name: str, launch: Launch, place: Place, kept: KeptFiles, care: Care) -> None:
        self.stopped = False
        self._store, self._name, self._place = store, name, place
        self._launch, self._kept, self._care = launch, kept, care
        if place.number:  # the first host writes for all
            kept.targets = []
        self._shown = 0  # the version whose figures were shown

    @contextmanager
    def evaluated(self, evaluation: EvaluatorOptions, command: Sequence[str]) -> Iterator[EvaluatorProcess | None]:
        """Evaluate the versions of the job that is trained inside the block, if that is wanted."""
        if evaluation.orders is None or self._place.number:
            yield None
            return
        launch = self._launch
        supervisor = Supervisor(self._store, self._place.launched_by, self._find, self._care)
        environment = launch_variables.of_evaluator(
            evaluation.orders, launch.workers, self._name, self._place.id, launch.given
        )
        with EvaluatorProcess(supervisor, evaluation, command, environment) as evaluator:
            yield evaluator

    def train(
        self, command: Sequence[str], aggregators: int, stop: Stop, evaluator: EvaluatorProcess | None
    ) -> tuple[Job | None, list[Child]]:
        """Run the copies until they have ended; the job waits for `workers` of them. Return the job that they made, if
        any, and the copies."""
        launch = self._launch
        supervisor = Supervisor(self._store, self._place.launched_by, self._find, self._care)
        try:
            serving = aggregate(supervisor, self._name, aggregators, self._kept.aggregator_options())
            copies = []
            for rank in self._place.ranks:
                # Otherwise Python keeps its output in a buffer, because stdout is a pipe.
                environment = {"PYTHONUNBUFFERED": "1"}
                environment |= launch_variables.of_copy(rank, launch.workers, self._name, self._place.id, launch.given)
                copies.append(supervisor.run(f"w{rank}", command, environment))
            job = self._job_made(supervisor, copies, stop)
            if job is None:
                self.stopped = stop.asked
                return None, copies
            quiet = launch.quiet
            with self._kept.logging_to(job, quiet):
                with Display(job, {}, quiet) as display:
                    scaled = Copies(supervisor, copies, min(launch.workers, len(copies)), stop)
                    follow(supervisor, job, serving, scaled, display, lambda state: self._show_figures(job, state))
                if job.state().finished(job.config):
                    if evaluator:
                        evaluator.await_last(quiet, lambda: stop.asked)
                elif stop.asked or any(copy.suspended for copy in copies):
                    self.stopped = True
                    self._keep(job)
                elif self._kept.saving and job.state().version:  # a copy failed: no aggregator writes the last version
                    self._keep(job)
            finish(supervisor, job, serving)
            self._show_figures(job, job.state())
            return job, copies
        finally:
            supervisor.end()
            relay(supervisor.new_lines())

    @staticmethod
    def _job_made(supervisor: Supervisor, copies: Sequence[Child], stop: Stop) -> Job | None:
        """Return the job once the first copy has made it, or None if no copy can make it any more, or none is to."""
        while True:
            failed = any(copy.failed and copy.done for copy in copies)
            over = failed or copies[0].done
            if over and not failed:  # the other copies wait for the job, or are about to end too
                supervisor.await_end([copy.name for copy in copies], _LAST_S)
            job = supervisor.job  # looked up after the ends: a copy that ended may have made it
            if job or over or stop.asked:
                return job
            supervisor.watch(POLL_S)
            # A short run may be over at the first look at it, and its figures come before its last lines.
            lines = supervisor.waiting_lines
            if not supervisor.job:
                relay(supervisor.new_lines(lines))

    def _find(self) -> Job | None:
        """Return the job of this run, or None before it is made."""
        with suppress(JobNotFound):
            job = self._store.job(self._name)
            return job if job.id == self._place.id else None
        return None

    def _keep(self, job: Job) -> None:
        if self._place.leads:
            keep(job, self._kept, self._launch.quiet)

    def _show_figures(self, job: Job, state: State) -> None:
        """Print a version's figures once, as soon as the job is finished: the script's last lines then come later."""
        if state.version != self._shown and not self._launch.quiet:
            self._shown = state.version
            say(str(Figures.of(job, state)))
