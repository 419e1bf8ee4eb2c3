"""The jobs of one `kvps run`, as its copies make them: each has aggregators of its own until it is finished."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from typing import NamedTuple

from kvps.errors import InvalidName
from kvps.job import Job
from kvps.protocol.job_state import State
from kvps.protocol.keys import check_new_name
from kvps.run_jobs import LONGEST_RUN, Run
from kvps.store import Store
from kvps_cli.child import Child
from kvps_cli.output import say
from kvps_cli.supervise import Supervisor
from kvps_cli.train.kept_files import KeptFiles
from kvps_cli.train.progress import Display, Figures, Followed, aggregate


def check_run_name(name: str) -> str:
    """Return the name of a run that begins. Raises InvalidName."""
    if len(check_new_name("job", name)) > LONGEST_RUN:
        raise InvalidName(
            f"job name {name!r} is too long for a run, whose later jobs have a number behind it: give one of at most "
            f"{LONGEST_RUN} characters, --job NAME"
        )
    return name


def finder(store: Store, run: Run) -> Callable[[], list[Job]]:
    """Return a function that returns the jobs of a run that were made so far, in the order in which it found them."""
    found = dict[str, Job]()

    def jobs() -> list[Job]:
        found.update({job.name: job for job in run.jobs(store, found)})
        return list(found.values())

    return jobs


class Served(NamedTuple):
    """How the jobs of a run are served and shown."""

    aggregators: int
    kept: KeptFiles
    quiet: bool


class JobsOfRun:
    """The jobs that a run trains. Those that were `done` before it began have nothing to be served.

    Inside the block they are logged and shown.
    """

    def __init__(self, supervisor: Supervisor, run: Run, served: Served, done: Collection[str]) -> None:
        self._supervisor = supervisor
        self._run = run
        self._served = served
        self._done = done
        self._followed = dict[str, Followed]()
        self._shown = dict[str, int]()  # job -> the version whose figures were shown
        self._logs = dict[str, ExitStack]()
        self._display = ExitStack()  # of the newest job, which has the terminal
        self._first = self._aggregate(run.name) if run.name not in done else []

    def _aggregate(self, job: str) -> list[Child]:
        which = "" if job == self._run.name else f" of {job}"
        options = self._served.kept.aggregator_options()
        return aggregate(self._supervisor, job, self._served.aggregators, options, which)

    def followed(self, maker: Child | None) -> Sequence[Followed]:
        """Return the jobs that are there and were not done before; `maker` is the copy that makes them, None if that is
        on another host."""
        over = maker is not None and maker.done  # looked at before: it may have made one and ended
        jobs = self._supervisor.jobs()
        for job in jobs:
            if job.name not in self._followed and job.name not in self._done:
                self._follow(job)
            if maker is not None and over:
                job.access.client.call("SET", job.access.keys.last, maker.code or 0)
        for name in [*self._logs][:-1]:
            if self._followed[name].over:
                self._logs.pop(name).close()
        return list(self._followed.values())

    def _follow(self, job: Job) -> None:
        quiet, later = self._served.quiet, job.name != self._run.name
        serving = self._aggregate(job.name) if later else self._first
        self._logs[job.name] = log = ExitStack()
        log.enter_context(self._served.kept.logging_to(job, quiet, which=self._which(job)))
        self._display.close()
        display = self._display.enter_context(Display(job, quiet, self._title(job)))
        self._followed[job.name] = Followed(job, serving, display, lambda state: self._show_figures(job, state))

    def _which(self, job: Job) -> str:
        return job.name[len(self._run.name) + 1 :]

    def _title(self, job: Job) -> str:
        return f"job {job.name}: " if self._which(job) else ""

    def show_figures(self) -> None:
        """Print the figures of all jobs whose newest ones were not printed."""
        for each in self._followed.values():
            self._show_figures(each.job, each.job.state())

    def _show_figures(self, job: Job, state: State) -> None:
        """Print a version's figures once, as soon as the job is finished: the script's last lines then come later."""
        if state.version != self._shown.get(job.name, 0) and not self._served.quiet:
            self._shown[job.name] = state.version
            say(f"{self._title(job)}{Figures.of(job, state)}")

    def __enter__(self) -> JobsOfRun:
        return self

    def __exit__(self, *error: object) -> None:
        for view in (self._display, *self._logs.values()):
            view.close()
