"""`kvps run --learner`: starts a learner that publishes its versions, and actors that watch them, and keeps both
running until the learner has ended."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import typer

from kvps.errors import InvalidSetting, JobError, KvpsError, counted
from kvps.history.log_stream import LogStream
from kvps.job import Job
from kvps.machine import launcher
from kvps.machine.launcher import ACTOR, CHECKPOINT_EVERY, CHECKPOINTS, JOB, RESUME
from kvps.protocol.answers import job_exists
from kvps.store import Store
from kvps_cli import connect
from kvps_cli.child import SUSPENDED, Child
from kvps_cli.output import log_options, loss_text, say, start_log
from kvps_cli.supervise import Care, Supervisor
from kvps_cli.train.evaluator import EvaluatorOptions
from kvps_cli.train.kept_files import KeptFiles
from kvps_cli.train.lifetime import Lifetime
from kvps_cli.train.progress import POLL_S, relay
from kvps_cli.train.settings import JobOptions
from kvps_cli.train.stop import Stop

LEARNER = "learner"
_LINE_EVERY_S = 2.0
_RECENT = 100  # entries of the log, among which the newest version is looked for
_LAST_S = 10.0  # for actors to see that the job is finished


class Parts(NamedTuple):
    """What is run: the learner's command, that of the actors, and how many of them."""

    learner: Sequence[str]
    actor: Sequence[str]
    actors: int

    @classmethod
    def of(cls, learner: str, command: Sequence[str], settings: JobOptions, checked: Callable[..., list[str]]) -> Parts:
        """Return what an option and the command ask for. Raises InvalidSetting."""
        if given := [name for name in settings.given if name != "workers"]:
            option = given[0].removesuffix("_ms").replace("_", "-")
            raise InvalidSetting(f"--{option} is for workers: with --learner the script says it to Store.publisher")
        return cls(checked(shlex.split(learner)), checked(command), settings.workers)


def check_options(
    hosts: int, aggregators: int, settings: JobOptions, kept: KeptFiles, evaluation: EvaluatorOptions
) -> None:
    """Raise InvalidSetting for an option of `kvps run` that means nothing where a learner publishes the job."""
    given = {
        "--hosts": hosts > 1,
        "--aggregators": aggregators > 1,
        "-w MIN:MAX": settings.elastic,
        "--record": kept.record is not None,
        "--log": bool(kept.targets),
        "--log-keep": kept.log_keep is not None,
        "--keep": kept.keep != 3,
        "--evaluator or --eval-every": evaluation.orders is not None,
    }
    for option in (option for option, is_given in given.items() if is_given):
        raise InvalidSetting(f"{option} is for a job that workers train: leave it out with --learner")


def run_learner(
    server: connect.RunServerOptions,
    named: Callable[[Store], str],
    parts: Parts,
    kept: KeptFiles,
    life: Lifetime,
    log_of: tuple[bool, int],
) -> None:
    """Run a learner and its actors until it has ended. `named` returns the name of the run, `log_of` is --quiet and
    --verbose. Raises KvpsError if the learner fails, or all actors do; Exit if it is stopped, to be resumed."""
    quiet = start_log(*log_of)
    with connect.serving_store(server, quiet, joinable=False) as store:
        name = named(store)
        if not life.resume and name in store.jobs():
            raise job_exists(name)
        care = life.care(parts.actors > 1, log_options(*log_of))
        _run(store, name, parts, {JOB: name, **_files(kept, life)}, care, quiet)


def _run(store: Store, name: str, parts: Parts, own: Mapping[str, str], care: Care, quiet: bool) -> None:
    """Run both, with `own` in the environment of each."""
    published = _Published(store, name)
    supervisor = published.supervisor = Supervisor(store, launcher.this_process("kvps run"), published.jobs, care)
    lines = _Lines(quiet)
    with Stop(possible=True) as stop:
        try:
            learner = supervisor.run(LEARNER, parts.learner, own)
            actors = [supervisor.run(f"a{n}", parts.actor, {**own, ACTOR: f"a{n}"}) for n in range(parts.actors)]
            while not learner.done:
                supervisor.watch(POLL_S)
                relay(supervisor.new_lines())
                jobs = published.jobs()
                stop.tell(supervisor, jobs)
                lines.show(jobs)
                _check(actors, stop.asked)
            if not (learner.code or stop.asked):
                supervisor.await_end([actor.name for actor in actors], _LAST_S)
        finally:
            supervisor.end()
            relay(supervisor.new_lines())
        _conclude(learner, published.jobs(), stop.asked, quiet)


def _files(kept: KeptFiles, life: Lifetime) -> dict[str, str]:
    """Return where the learner finds and writes checkpoints, unless its script says so."""
    if not (directory := kept.kept_log.directory):
        return {}
    every = {CHECKPOINT_EVERY: str(kept.saving.every)} if kept.saving else {}
    return {CHECKPOINTS: str(directory), RESUME: "1" if life.resume else "", **every}


class _Published:
    """The jobs that the learner of this run publishes: the one of the run's name, and those that its process holds.
    Others on the server are not its own, and are never stopped."""

    supervisor: Supervisor

    def __init__(self, store: Store, name: str) -> None:
        self._store, self._name = store, name
        self._opened: dict[str, Job] = {}
        self._own = set[str]()

    def jobs(self) -> list[Job]:
        """Return those that are there."""
        names = self._store.jobs()
        for name in names:
            with suppress(JobError):  # it is being made or removed
                job = self._opened.get(name) or self._opened.setdefault(name, self._store.job(name))
                if name not in self._own and job.config.metadata.publishes and self._is_own(job):
                    self._own.add(name)
        return [self._opened[name] for name in names if name in self._own]

    def _is_own(self, job: Job) -> bool:
        learner = self.supervisor.children.get(LEARNER)
        return job.name == self._name or self.supervisor.name_of(job.access.reader.holders()[0]) == str(learner)


def _check(actors: Sequence[Child], stopping: bool) -> None:
    """Raise KvpsError if no actor is left, and one has failed."""
    failed = [actor.name for actor in actors if actor.done and actor.failed]
    if failed and all(actor.done for actor in actors) and not stopping:
        raise KvpsError(f"the run ends: no actor is left ({', '.join(failed)} failed)")


def _conclude(learner: Child, jobs: Sequence[Job], stopped: bool, quiet: bool) -> None:
    """Say what came of it. Raises KvpsError, Exit."""
    if learner.failed or learner.signal:
        how = f"ended with code {learner.code}" if learner.failed else f"was killed ({learner.kill})"
        raise KvpsError(f"the run ends: the learner {how}")
    if not jobs:
        raise KvpsError("the learner has ended and published no job: it calls kvps.connect().publisher(...)")
    if stopped or learner.suspended:
        say("; ".join(f"job {job.name}: stopped at version {job.state().version}, can be resumed" for job in jobs))
        raise typer.Exit(SUSPENDED)
    for job in () if quiet else jobs:
        say(f"job {job.name}: {_now(job)}")


class _Lines:
    """Says how far the jobs are, a line every 2 s."""

    def __init__(self, quiet: bool) -> None:
        self._next = float("inf") if quiet else time.monotonic() + _LINE_EVERY_S

    def show(self, jobs: Sequence[Job]) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _LINE_EVERY_S
            for job in jobs:
                say(f"job {job.name}: {_now(job)}")


def _now(job: Job) -> str:
    """Return how far a published job is."""
    newest = next(iter(LogStream(job.access).newest_commits(_RECENT)), None)
    line = f"version {job.state().version:,}  loss {loss_text(newest.plan.loss if newest else None)}"
    if not job.config.metadata.rollouts:
        return line
    now = job.rollouts.now(staleness=False)
    prompts = f"  prompts {now.closed:,} of {units:,}" if (units := job.rollouts.settings.units) else ""
    ended = f"trained {now.trained:,}, stale {now.stale:,}, rejected {now.rejected:,}"
    return f"{line}  {counted(len(now.actors), 'actor')}{prompts}  items: waiting {now.waiting:,}, {ended}"
