"""The jobs of one run of a script: one after another, or at once under names of their own.

Without names they are NAME, NAME.2, NAME.3, ...; those that the script calls critic are NAME.critic, NAME.critic.2, ...
Each copy counts its own, and so all copies agree. The id of each job follows from the run's id, so that no copy takes
the job of another run for its own.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Container, Iterable, Iterator
from contextlib import suppress
from typing import NamedTuple

from kvps.config import JobConfig
from kvps.errors import InvalidName, JobNotFound, JobSuspended, WrongOrder, shown
from kvps.job import Job, is_left
from kvps.parsing import LONGEST_NAME
from kvps.protocol.keys import JobKeys, check_name, check_new_name
from kvps.store import Store

LONGEST_RUN = LONGEST_NAME - len(".999")
"""How long the name of a run may be: its later jobs have a number behind it."""
LOOK_AGAIN_S = 0.05


class Run(NamedTuple):
    """A run by its name and id, which are also those of its first job without a name."""

    name: str
    id: str

    @classmethod
    def of(cls, job: Job) -> Run:
        """Return the run to which a job belongs, or that begins with it."""
        return cls.holding(run_of(job.config) or job.name, job.name, job.id)

    @classmethod
    def holding(cls, name: str, job: str, id: str) -> Run:
        """Return the run of that name which has this job."""
        return cls(name, cls(name, id).job_id(job))

    def job_name(self, which: str) -> str:
        """Return the name of the job that `NextJobs.which` has named. Raises InvalidName."""
        return check_new_name("job", f"{self.name}.{which}" if which else self.name)

    def job_id(self, job: str) -> str:
        """Return the id of the job of that name."""
        behind = job.removeprefix(self.name)
        mixed = int(hashlib.sha256(behind.encode()).hexdigest()[:8], 16) if behind else 0
        return f"{int(self.id, 16) ^ mixed:08x}"

    def jobs(self, store: Store, known: Container[str] = ()) -> Iterator[Job]:
        """Yield the run's jobs on a server that are not `known`, in the order of their names and numbers."""
        for name in names_of(self.name, store.jobs()):
            with suppress(JobNotFound):
                if name not in known and (job := store.job(name)).id == self.job_id(name):
                    yield job


def names_of(run: str, names: Iterable[str]) -> list[str]:
    """Return those `names` that jobs of a run may have, in their order."""
    return sorted((name for name in names if name == run or name.startswith(f"{run}.")), key=in_order)


def run_of(config: JobConfig) -> str:
    """Return the name of the run that has made a job, "" if it says none."""
    return config.metadata.launcher.run if config.metadata.launcher else ""


def in_order(job: str) -> tuple[str, int]:
    """Return the key by which the names of a run's jobs are sorted."""
    name, _, number = job.rpartition(".")
    return (name, int(number)) if number.isdecimal() else (job, 1)


class NextJobs:
    """The jobs that this process has made in its run: how many there were of each name, and which one is open."""

    def __init__(self) -> None:
        self._counts = Counter[str]()
        self._open: dict[str, Job] = {}
        self.newest: JobKeys | None = None

    def which(self, name: str) -> str:
        """Return what the next job called `name` has behind the name of the run: "", "2", "critic", "critic.2". Raises
        InvalidName, and WrongOrder while the one before is open."""
        if name and check_name("job", name).isdecimal():
            raise InvalidName(f"job name {shown(name)} is not allowed: the later jobs of a run have numbers")
        before = self._open.get(name)
        if before is not None and not is_left(before):
            raise WrongOrder(
                f"this script trains job {before.name!r} already: close its optimizer or its session before the next "
                f'one begins, or give one of them a name if both are to train at once, as in name="critic"'
            )
        number = self._counts[name] + 1
        return ".".join([*([name] if name else []), *([str(number)] if number > 1 else [])])

    def began(self, name: str, job: Job) -> None:
        """Note that the job that `which` has named is there."""
        self._counts[name] += 1
        self._open[name], self.newest = job, job.access.keys

    def closed(self, job: Job) -> None:
        """Note that a job is open no longer."""
        self._open = {name: other for name, other in self._open.items() if other is not job}


def is_last(store: Store, job: JobKeys) -> bool:
    """Return whether the run of this job makes no other one, because its rank 0 has ended."""
    return bool(store.client.call("EXISTS", job.last))


def may_begin(store: Store, before: JobKeys | None) -> bool:
    """Return True. Raises JobSuspended if the run was stopped behind its job `before`."""
    if before and (store.client.call("HGET", before.version, "run") or "").startswith("suspend"):
        why = store.job(before.job).state().run.why
        raise JobSuspended(f"job {before.job!r} was {why}; the run goes on from here when it is resumed")
    return True


def awaited(store: Store, name: str, before: JobKeys | None) -> Job:
    """Return the job of that name, as soon as rank 0 has made it, behind the job `before`. Raises WrongOrder if nobody
    makes it any more, JobSuspended if the run was stopped."""
    while True:
        over = before is not None and is_last(store, before)
        with suppress(JobNotFound):
            return store.job(name)
        may_begin(store, before)
        if over:
            raise WrongOrder(f"rank 0 has ended and made no job {name!r}: all copies of a script must make the same")
        time.sleep(LOOK_AGAIN_S)  # a job that does not exist has no stream to wait on
