"""What `kvps run` tells the copies of a script, and how a script hears it. These names stand nowhere else.

KVPS_RANK       which copy it is, from 0; it is the worker w<rank>
KVPS_WORKERS    how many copies there are
KVPS_JOB        name of the job
KVPS_JOB_ID     the id under which it is made, so that no copy takes another run's job of that name for its own
KVPS_SETTINGS   JSON: the job's settings that were given to `kvps run`
KVPS_REDIS_URL  the server; also read without `kvps run`
KVPS_LAUNCHER   see kvps.machine.launcher
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from kvps import optimizers
from kvps.config import JobConfig
from kvps.errors import InvalidSetting, JobExists, JobNotFound, KvpsError, WrongOrder
from kvps.job import Job
from kvps.local_job import LocalJob, local
from kvps.machine import launcher
from kvps.machine.fork import ProcessOwner
from kvps.store import Store, connect

_RANK, _WORKERS, _JOB, _JOB_ID, _SETTINGS, _URL = (
    f"KVPS_{name}" for name in ("RANK", "WORKERS", "JOB", "JOB_ID", "SETTINGS", "REDIS_URL")
)
_LOOK_AGAIN_S = 0.05


def of_copy(rank: int, workers: int, job: str, id: str, settings: Mapping[str, Any]) -> dict[str, str]:
    """The environment of one copy, but for the URL; `settings` are a JobConfig's."""
    written = {n: v.to_json() if isinstance(v, optimizers.Optimizer) else v for n, v in settings.items()}
    values = {_RANK: rank, _WORKERS: workers, _JOB: job, _JOB_ID: id, _SETTINGS: json.dumps(written)}
    return {name: str(value) for name, value in values.items()}


def from_env() -> RunContext:
    """Which worker of which run this process is, as `kvps run` has told it.

    with kvps.from_env() as worker:
        job = worker.create_job(params, optimizer=kvps.SGD(lr=0.1))
        with job.join(worker.id) as session:
            while session.round < rounds:
                params = session.pull()
                session.push(gradient(params))

    Without `kvps run` it is the only one, and serves its job itself, see `local`. Under `kvps run` an error of kvps
    that the script does not catch is one line. Raises InvalidSetting, NoServer.
    """
    url = os.environ.get(_URL)
    if _RANK not in os.environ:
        return RunContext(0, 1, {}, url, None)
    try:
        rank, workers = int(os.environ[_RANK]), int(os.environ[_WORKERS])
        run = (os.environ[_JOB], os.environ[_JOB_ID])
        settings = json.loads(os.environ[_SETTINGS])
        if "optimizer" in settings:
            settings["optimizer"] = optimizers.from_json(settings["optimizer"])
    except (LookupError, TypeError, ValueError) as error:
        raise InvalidSetting(
            f"{_RANK} is set, but the rest is not as kvps run sets it ({type(error).__name__}: {error}): use kvps run, "
            f"or unset {_RANK} to run alone"
        ) from None
    sys.excepthook = _in_one_line
    return RunContext(rank, workers, settings, url, run)


class RunContext:
    """One copy of a script. `from_env` makes it.

    rank      which one, from 0
    workers   how many there are
    id        its worker id, for `Job.join`: the same when it is started again
    settings  the job's settings that were given to `kvps run`, under the names of `JobConfig`
    """

    def __init__(
        self, rank: int, workers: int, settings: Mapping[str, Any], url: str | None, run: tuple[str, str] | None
    ) -> None:
        self._owner = ProcessOwner("the worker of kvps.from_env()")
        self.rank = rank
        self.workers = workers
        self.id = f"w{rank}"
        self.settings = dict(settings)
        self._url = url
        self._run = run
        self._store = connect(url) if run else None
        self._local: LocalJob | None = None
        self._made = False

    def create_job(self, params: Mapping[str, Any], **settings: Any) -> Job:
        """The job that all copies train; it begins with the `params` of the first (name -> float32 array).

        The copy of rank 0 makes it, or finds it when it is started again; the others wait for it. `settings` are those
        of `JobConfig`. What was given to `kvps run` holds too; where both speak they must say the same. Raises
        InvalidSetting, WrongOrder for a second job, and what `Store.create_job` does.
        """
        self._owner.check()
        if self._made:
            raise WrongOrder("create_job() was called before: a run has one job")
        if "config" in settings:
            raise InvalidSetting("create_job: give single settings and no config: kvps run adds its own to them")
        told = {"workers": self.workers} | self.settings
        for name, value in settings.items():
            if told.get(name, value) != value:
                raise InvalidSetting(self._contradiction(name, value, told[name]))
        merged = settings | told
        JobConfig.of("create_job", None, merged)  # in every copy: one that waits for the job would wait for ever
        if self._store is None or self._run is None:
            self._local = local(params, url=self._url, **merged)
            self._made = True
            return self._local
        name, id = self._run
        job = None
        if self.rank == 0:
            with suppress(JobExists):
                job = self._store.create_job(name, params, id=id, launched_by=launcher.own(), **merged)
        job = job or _awaited(self._store, name)
        if job.id != id:
            raise JobExists(
                f"another run has just made a job {name!r}: give this one its own name, kvps run --job NAME"
            )
        self._made = True
        return job

    def _contradiction(self, name: str, here: Any, told: Any) -> str:
        if self._run is None:
            return f"this script asks for {here} workers and runs alone: kvps run -w {here} -- python {sys.argv[0]}"
        return f"{name}: the script says {here} and kvps run says {told}: let only one of them say it"

    def close(self) -> None:
        """Close the connection; a job that this process serves itself ends. In a fork it does nothing."""
        if not self._owner.is_here:
            return
        if self._store:
            self._store.close()
        if self._local:
            self._local.close()
            self._local = None

    def __enter__(self) -> RunContext:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _awaited(store: Store, name: str) -> Job:
    """The job of that name, as soon as it is there."""
    while True:
        with suppress(JobNotFound):
            return store.job(name)
        time.sleep(_LOOK_AGAIN_S)  # what is not there has no bell


def _in_one_line(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """What nobody has caught: of kvps's own errors a line, which says where in the script."""
    if not isinstance(error, KvpsError) or os.environ.get("KVPS_TRACEBACK"):
        sys.__excepthook__(kind, error, trace)
        return
    ours = Path(__file__).parent
    frames = [f for f in traceback.extract_tb(trace) if ours not in Path(f.filename).parents]
    where = f"{Path(frames[-1].filename).name}, line {frames[-1].lineno}; " if frames else ""
    print(f"kvps: error: {' '.join(str(error).split())} ({where}KVPS_TRACEBACK=1 shows all of it)", file=sys.stderr)
