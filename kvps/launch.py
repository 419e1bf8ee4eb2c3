"""The environment variables that `kvps run` sets for each copy of a script, and `from_env`, which reads them.

KVPS_RANK       the number of the copy, from 0; the copy is the worker w<rank>
KVPS_WORKERS    the number of copies; with -w MIN:MAX it is MIN, the number for which the job waits
KVPS_JOB        the name of the run, which its first job has; see kvps.run_jobs
KVPS_JOB_ID     the id of that job, so that no copy takes another run's job of that name for its own
KVPS_SETTINGS   the job's settings that were given to `kvps run`, as JSON
KVPS_REDIS_URL  the URL of the server; `kvps.connect` reads it, also without `kvps run`
KVPS_LAUNCHER   see kvps.machine.launcher
KVPS_EVALUATES  see kvps.evaluator; the process that has it has no KVPS_RANK
KVPS_ASKS       a file into which the copy of rank 0 writes the settings that its script states, and ends

A copy that is started by hand has KVPS_JOB alone, the name of a job that hands out units: it joins that job.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Unpack

from kvps import optim
from kvps.arrays.layout import Array
from kvps.config import JobConfig, JobSettings, Metadata, UncheckedConfig, takes_settings
from kvps.config.job_config import value_of
from kvps.errors import InvalidSetting, JobExists, KvpsError, WrongOrder
from kvps.evaluator import Evaluate, Evaluator, Orders
from kvps.history.evaluations import Evaluation
from kvps.job import Job
from kvps.local_job import LocalJob, local
from kvps.machine import launcher
from kvps.machine.fork import ProcessOwner
from kvps.protocol.keys import check_id
from kvps.run_jobs import LOOK_AGAIN_S, NextJobs, Run, awaited, is_last, may_begin
from kvps.store import connect

log = logging.getLogger("kvps.launch")

_RANK = launcher.RANK
_WORKERS, _JOB, _JOB_ID, _SETTINGS = (f"KVPS_{name}" for name in ("WORKERS", "JOB", "JOB_ID", "SETTINGS"))
ASKS = "KVPS_ASKS"
_THREADS = "OMP_NUM_THREADS"
_made_here = NextJobs()
_evaluated = set[str]()  # ids of jobs


def of_copy(rank: int, workers: int, job: str, id: str, settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment variables of one copy, except the URL; `settings` are those of a JobConfig."""
    return {_RANK: str(rank)} | _of_run(workers, job, id, settings)


def of_evaluator(orders: Orders, workers: int, job: str, id: str, settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment variables of the process that evaluates the versions of a run, except the URL."""
    return orders.variable() | _of_run(workers, job, id, settings)


def _of_run(workers: int, job: str, id: str, settings: Mapping[str, Any]) -> dict[str, str]:
    written = {n: v.to_json() if isinstance(v, optim.Optimizer) else v for n, v in settings.items()}
    values = {_WORKERS: workers, _JOB: job, _JOB_ID: id, _SETTINGS: json.dumps(written)}
    return {name: str(value) for name, value in values.items()}


def from_env() -> RunContext:
    """Return which worker of which run this process is, as `kvps run` has set it.

    with kvps.from_env() as worker:
        job = worker.create_job(params, optimizer=kvps.SGD(lr=0.1))
        with job.join(worker.id) as session:
            while session.clock < rounds:  # how many it has done, also before it was killed and started again
                params = session.pull()
                session.push(gradient(params, worker.rank, session.clock))

    Without `kvps run` the process is the only worker and serves its job itself, as `local` does; but if KVPS_JOB names
    a job that hands out units, it is one more worker of that job. Under `kvps run` and with KVPS_JOB an error of kvps
    that the script does not catch is printed as one line. Raises InvalidSetting, NoServer, JobNotFound.
    """
    if _RANK not in os.environ and _JOB not in os.environ:
        return RunContext(0, 1, {}, None)
    sys.excepthook = _in_one_line
    orders = Orders.of_this_process()
    if _RANK not in os.environ and orders is None:
        return _one_more(os.environ[_JOB])
    advice = f"use kvps run, which sets it, or unset {_RANK} to run alone"
    if missing := [name for name in (_WORKERS, _JOB, _JOB_ID, _SETTINGS) if name not in os.environ]:
        raise InvalidSetting(f"{_RANK} is set, and {', '.join(missing)} not: {advice}")
    try:
        workers = int(os.environ[_WORKERS])
        rank = workers if orders else int(os.environ[_RANK])
        run = Run(os.environ[_JOB], check_id(os.environ[_JOB_ID]))
        settings = json.loads(os.environ[_SETTINGS])
        if "optimizer" in settings:
            settings["optimizer"] = optim.from_json(settings["optimizer"])
    except (LookupError, TypeError, ValueError) as error:
        names = f"{_RANK}, {_WORKERS} and {_SETTINGS}"
        raise InvalidSetting(f"{names} are not as kvps run sets them ({error}): {advice}") from None
    if orders:
        return EvaluatorContext(rank, workers, settings, run, launcher.EVALUATOR)
    return RunContext(rank, workers, settings, run)


def _one_more(name: str) -> RunContext:
    """Return the context of a copy that was started by hand, to join the job `name`. Its rank is that of no copy of
    `kvps run`."""
    with connect() as store:
        job = store.job(name)
        run = Run.of(job)
    if not job.config.units:
        raise InvalidSetting(
            f"{_JOB}={name}: that job hands out no units, so that one more copy would have no data; unset {_JOB} to "
            f"run alone"
        )
    launched = job.config.metadata.foreign_launcher
    rank = max(job.config.workers, launched.most if launched else 0)
    return RunContext(rank, job.config.workers, {}, run, f"x{secrets.token_hex(3)}")


class RunContext:
    """One copy of a script, as `from_env` returns it.

    rank      the number of the copy, from 0; a copy that was started by hand has a higher one than all others
    workers   the number of copies; with -w MIN:MAX it is MIN
    id        the worker id for `Job.join`: the same when `kvps run` starts the copy again
    settings  the job's settings that were given to `kvps run`, under the names of `JobConfig`
    """

    def __init__(self, rank: int, workers: int, settings: Mapping[str, Any], run: Run | None, id: str = "") -> None:
        self._owner = ProcessOwner("the worker of kvps.from_env()")
        self.rank = rank
        self.workers = workers
        self.id = id or f"w{rank}"
        self.settings = dict(settings)
        self._run = run
        self._store = connect() if run else None
        self._jobs: list[Job] = []

    @takes_settings
    def create_job(
        self, params: Mapping[str, Any], *, name: str = "", rounds: int = 0, **settings: Unpack[JobSettings]
    ) -> Job:
        """Return the job that all copies train. It begins with the `params` (name -> float32 array) of rank 0.

        The copy of rank 0 creates the job, or finds it when it is started again; the others wait for it. `settings` are
        those of `JobConfig`, and those given to `kvps run` apply too; a setting given in both must be the same in both.
        `rounds` is how many each worker is going to do, so that screens can show how much is done.
        A copy that was started by hand gets its job as that is.
        A script may have several jobs. The next one, as of another fold, is a job of its own as soon as the session of
        the one before is closed. Two at once need a `name`, at least one of them. All copies make the same jobs.
        Raises InvalidSetting, InvalidName, WrongOrder for a second job at once, JobSuspended if the run is stopped
        before this job begins, and what `Store.create_job` raises.
        """
        self._owner.check()
        which = _made_here.which(name)
        if "config" in settings:
            raise InvalidSetting("create_job: give single settings and no config: kvps run adds its own to them")
        given: dict[str, Any] = {"workers": self.workers} | self.settings
        for setting, value in settings.items():
            if given.get(setting, value) != value:
                raise InvalidSetting(self._contradiction(setting, value, given[setting]))
        # In every copy: one that only waited for the job would wait for ever.
        config = JobConfig.of("create_job", None, settings | given, Metadata(rounds=rounds))
        if (most := launcher.own_most()) > self.workers and not config.units:
            raise InvalidSetting(
                f"kvps run -w {self.workers}:{most} is for a job that hands out units, which any number of workers "
                f"shares: create_job(..., units=N), or kvps run -w {most}"
            )
        said = {*settings, *given, *(["rounds"] if rounds else [])}
        if asks := os.environ.get(ASKS):
            stated = {*said, *(("units", "units_per_epoch") if config.samples else ())}
            Path(asks).write_text(json.dumps({name: config.to_hash()[name] for name in stated}))
            raise SystemExit(0)
        if self._store is None or self._run is None:
            self._jobs.append(alone := local(params, config=config))
            return alone
        if config.unit_rounds and self.workers == 1 and _THREADS not in os.environ:
            log.warning("set %s=1 if other numbers of copies are to reach the same bits as this single one", _THREADS)
        job, called = None, self._run.job_name(which)
        if self.rank == 0 and may_begin(self._store, _made_here.newest):
            with suppress(JobExists):
                config = config.noting(launched_by=launcher.own())
                job = self._store.create_job(called, params, config=config, id=self._run.job_id(called))
        found, job = job is None, job or self._found(called)
        if found and (differing := job.config.differing(config, said)):
            raise InvalidSetting(other_settings(called, job.config, config, differing))
        self._began(name, job)
        return job

    def _found(self, name: str) -> Job:
        """Return the job of that name, as soon as rank 0 has made it. Raises JobExists if that is another run's."""
        assert self._store
        assert self._run
        job = awaited(self._store, name, _made_here.newest)
        if job.id != self._run.job_id(name):
            raise JobExists(
                f"another run has just made a job {name!r}: give this one its own name, kvps run --job NAME"
            )
        return job

    def _began(self, name: str, job: Job) -> None:
        self._jobs.append(job)
        _made_here.began(name, job)

    @property
    def is_evaluator(self) -> bool:
        """Whether this process evaluates the versions that the workers make, and is no worker."""
        return self.id == launcher.EVALUATOR

    def evaluates(self, job: Job) -> Callable[[Evaluate], Evaluate]:
        """Decorate the function that evaluates a version: it gets name -> read-only array, and returns its figures, as
        in ``{"loss": 0.12}``. Put it behind create_job(), and before join().

        In a worker this changes nothing. In the evaluator of ``kvps run --eval-every N`` it calls the function with
        each N-th version, reports what it returns, and after the job's last version ends the process.
        """
        return lambda evaluate: evaluate

    def versions(self) -> Iterator[tuple[int, dict[str, Array]]]:
        """In the evaluator of a run, yield its versions with their weights as `Job.versions` does, after the last one
        that was evaluated. Raises WrongOrder in a worker."""
        raise WrongOrder("this process is a worker: kvps run --evaluator starts the script that evaluates its versions")

    def report(self, version: int, figures: Mapping[str, float]) -> Evaluation:
        """In the evaluator of a run, report the figures of the version that `versions` has yielded last, as
        `Job.report` does, and keep it with --keep-best if it is the best so far. Raises WrongOrder in a worker."""
        raise WrongOrder("this process is a worker: it reports figures with job.report()")

    def _contradiction(self, name: str, here: Any, given: Any) -> str:
        if self._run is None:
            return f"this script asks for {here} workers and runs alone: kvps run -w {here} -- python {sys.argv[0]}"
        return f"{name}: the script says {here} and kvps run says {given}: let only one of them say it"

    def close(self) -> None:
        """Close the connection, and end the jobs that this process serves itself. Does nothing in a fork."""
        if not self._owner.is_here:
            return
        if self._store:
            self._store.close()
        while self._jobs:
            job = self._jobs.pop()
            _made_here.closed(job)
            if isinstance(job, LocalJob):
                job.close()

    def __enter__(self) -> RunContext:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class EvaluatorContext(RunContext):
    """The evaluator of a run, as `from_env` returns it there. `rank` is that of no worker."""

    _evaluator: Evaluator | None = None

    def create_job(
        self, params: Mapping[str, Any], *, name: str = "", rounds: int = 0, **settings: Unpack[JobSettings]
    ) -> Job:
        """Return the job of the run as soon as a worker has made it."""
        job = self.next_job(name)
        self._began(name, job)
        return job

    def next_job(self, name: str = "") -> Job:
        """Return the job that `create_job` would return, without counting it."""
        self._owner.check()
        assert self._run
        return self._found(self._run.job_name(_made_here.which(name)))

    def evaluates(self, job: Job) -> Callable[[Evaluate], Evaluate]:
        """Evaluate the job up to its last version. The script goes on if the run has another job then, and passes
        through this one. Else the process ends as soon as the run makes no further job."""
        orders = Orders.of_this_process()
        assert orders

        def run(evaluate: Evaluate) -> Evaluate:
            Evaluator(job, orders).run(evaluate)
            _evaluated.add(job.id)
            assert self._run
            assert self._store
            while True:
                over = is_last(self._store, job.access.keys)
                if any(other.id not in _evaluated for other in self._run.jobs(self._store)):
                    return evaluate
                if over:
                    raise SystemExit(0)
                time.sleep(LOOK_AGAIN_S)

        return run

    def versions(self) -> Iterator[tuple[int, dict[str, Array]]]:
        """Yield as `RunContext.versions` says; when called again, those of the next job of the run."""
        orders = Orders.of_this_process()
        assert orders
        job = self.next_job()
        self._evaluator = Evaluator(job, orders)
        yield from self._evaluator.versions()
        self._began("", job)
        _made_here.closed(job)

    def report(self, version: int, figures: Mapping[str, float]) -> Evaluation:
        if self._evaluator is None:
            raise WrongOrder("report() is for a version that versions() has yielded")
        return self._evaluator.report(version, figures)


def other_settings(job: str, config: JobConfig, asked: UncheckedConfig, differing: Sequence[str]) -> str:
    """Return the message about settings of a job that goes on, which are given again and are not the same."""
    pairs = [(name, value_of(config, name), value_of(asked, name)) for name in differing]
    each = [
        f"{name} {has}, not {other.beside(has) if isinstance(other, optim.Optimizer) else other}"
        for name, has, other in pairs
    ]
    return (
        f"job {job!r} goes on with the settings that it has: {'; '.join(each)}. Give the same again, or begin anew "
        f"under another name (--job NAME)"
    )


def _in_one_line(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an uncaught error; one of kvps as a single line that says where in the script it was raised."""
    if not isinstance(error, KvpsError) or os.environ.get("KVPS_TRACEBACK"):
        sys.__excepthook__(kind, error, trace)
        return
    ours = Path(__file__).parent
    frames = [f for f in traceback.extract_tb(trace) if ours not in Path(f.filename).parents]
    installed = [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")]
    # PyTorch and libraries with a loop of their own call step: the line that the user can mend is above theirs.
    frames = [f for f in frames if not any(i in Path(f.filename).parents for i in installed)] or frames
    where = f"{Path(frames[-1].filename).name}, line {frames[-1].lineno}; " if frames else ""
    print(f"kvps: error: {' '.join(str(error).split())} ({where}KVPS_TRACEBACK=1 shows all of it)", file=sys.stderr)
