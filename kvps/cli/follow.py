"""What `kvps up` and `kvps run` do alike: aggregators for a job, and a look at it until its workers have ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvps.cli.display import Display
from kvps.cli.supervise import Child, Supervisor
from kvps.errors import InvalidSetting, KvpsError
from kvps.job import Job

LOOK_S = 0.2
_FINISH_S = 5.0
_MOST_AGGREGATORS = 64


def check_aggregators(number: int) -> None:
    """Raise InvalidSetting for a number of aggregators that cannot be."""
    if not 1 <= number <= _MOST_AGGREGATORS:
        raise InvalidSetting(f"--aggregators must be from 1 to {_MOST_AGGREGATORS}, not {number}")


def aggregate(supervisor: Supervisor, job: str, number: int, options: Sequence[str]) -> list[Child]:
    """Start so many aggregators of the job, which need not be there yet."""
    names = [f"aggregator{n or ''}" for n in range(number)]
    return [supervisor.start(name, "aggregator", "start", "--job", job, *options) for name in names]


def follow(supervisor: Supervisor, job: Job, serving: list[Child], workers: list[Child], display: Display) -> None:
    """Show the job until its workers have ended and all that they pushed is committed.

    Raises KvpsError when that cannot come: a worker ended before it had joined, or all aggregators failed.
    """
    while not all(child.done for child in workers) or not job.state().settled:
        supervisor.watch(LOOK_S)
        for line in supervisor.said():
            display.message(line)
        ended = {child.name: child.failed for child in workers if child.done}
        state = job.state()  # behind that: who ended may have joined
        display.show(state, job.traces())
        if never := {name: failed for name, failed in ended.items() if name not in state.members}:
            how = "failed" if any(never.values()) else "ended"
            raise KvpsError(f"job {job.name} ends: {', '.join(never)} {how} before it had joined")
        _keep_served(job, serving, supervisor)
    display.show(job.state(), job.traces(), last=True)


def finish(supervisor: Supervisor, job: Job, serving: list[Child]) -> list[str]:
    """End the aggregators of a job whose workers have ended; what was said last."""
    if job.state().finished(job.config):
        supervisor.await_end([child.name for child in serving], _FINISH_S)  # they sweep up first
    supervisor.end()
    return supervisor.said()


def _keep_served(job: Job, serving: list[Child], supervisor: Supervisor) -> None:
    """Start an aggregator again if none is left and the job needs one. Raises what they said last if all failed."""
    if all(child.failed for child in serving):
        said = " ".join(supervisor.said()) or f"its aggregator ended with code {serving[0].code}"
        raise KvpsError(f"job {job.name} ends: {said}")
    # They end when the job is finished. It may be open again after that: a script joins a second time.
    if all(child.done for child in serving) and not job.state().settled:
        supervisor.run_again(next(child for child in serving if not child.failed))


def check_trained(job: str, version: int, workers: list[Child]) -> None:
    """Raise KvpsError if nothing was committed (version 0), or any of the workers failed."""
    failed = [child.name for child in workers if child.failed]
    all_failed = len(failed) == len(workers)
    if version == 0:
        what = "all its workers failed before anything" if all_failed else "nothing"
        raise KvpsError(f"job {job}: {what} was committed: there are no figures")
    if all_failed:
        raise KvpsError(f"job {job}: all its workers failed; the figures above are of what they had done by then")
    if failed:
        raise KvpsError(f"job {job}: {', '.join(failed)} failed; the others went on, their figures are above")


def check_killed(job: str, copies: list[Child]) -> None:
    """Raise KvpsError if a signal ended any of these copies of a script when its worker had finished."""
    if killed := [f"{child.name} ({child.signal})" for child in copies if child.signal]:
        raise KvpsError(
            f"job {job}: killed after the last round: {', '.join(killed)}; the weights are complete, but what the "
            f"script does after its rounds may be missing"
        )


class Figures(NamedTuple):
    """How many versions a job has, in how many seconds of training, and how many a second."""

    version: int
    seconds: float
    steps_per_s: float

    @classmethod
    def of(cls, job: Job, version: int) -> Figures:
        """Those of a job that has come to this version."""
        seconds = job.training_seconds()
        return cls(version, seconds, version / seconds if seconds else 0.0)

    def __str__(self) -> str:
        return f"{self.version} steps in {self.seconds:.1f} s, {self.steps_per_s:.0f} steps/s"
