"""`kvps stop`, `suspend`, `pause`, `resume` and `set`: change a run while it goes on. Each is an entry in its log."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from kvps.config import JobConfig
from kvps.errors import InvalidSetting, shown
from kvps.job import Job
from kvps.protocol.run_control import LEARNER_HAS_FINISHED, RunControl
from kvps_cli import connect, options
from kvps_cli.output import say

Reason = Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why, for the log.")]


def stop(job: options.JobName, reason: Reason = "", redis: options.Redis = None) -> None:
    """Have all workers of a job end with the same round: nothing that was acknowledged is left out."""
    _tell(Job.stop, job, reason, redis)


def suspend(job: options.JobName, reason: Reason = "", redis: options.Redis = None) -> None:
    """As kvps stop, but scripts end with code 75, and their workers go on from there after kvps resume."""
    _tell(Job.suspend, job, reason, redis)


def pause(job: options.JobName, reason: Reason = "", redis: options.Redis = None) -> None:
    """Have a job make no version until kvps resume. Its workers wait."""
    _tell(Job.pause, job, reason, redis)


def resume(job: options.JobName, reason: Reason = "", redis: options.Redis = None) -> None:
    """Have a job go on that was paused, suspended or stopped. Workers that have ended have to be started again."""
    with connect.existing_job(redis, job) as opened:
        before = opened.state().run
        opened.resume(reason)
        was = "goes on, as before" if before.state == "running" else f"goes on; it was {before.why}"
        say(f"job {job}: {was}{_over(opened)}")


def set_(
    job: options.JobName,
    setting: Annotated[str, typer.Argument(metavar="lr=RATE", help="The learning rate; lr=own: the optimizer's own.")],
    reason: Reason = "",
    redis: options.Redis = None,
) -> None:
    """Set the learning rate of a running job, in the place of its lr and schedule."""
    name, equals, value = setting.partition("=")
    if name != "lr" or not equals:
        raise InvalidSetting(f"{shown(setting)} cannot be set while a job runs: lr=RATE can")
    try:
        lr = None if value == "own" else float(value)
    except ValueError:
        raise InvalidSetting(f"lr must be a number, or own, not {shown(value)}") from None
    with connect.existing_job(redis, job) as opened:
        opened.set_lr(lr, reason)
        own, rate = ", its own" if lr is None else "", opened.state().learning_rate(opened.config)
        say(f"job {job}: learning rate {rate:g} from the next version on{own}{_over(opened)}")


def _tell(how: Callable[[Job, str], RunControl], job: str, reason: str, redis: str | None) -> None:
    with connect.existing_job(redis, job) as opened:
        run = how(opened, reason)
        say(f"job {job}: {ending(opened.config, run) if run.ends else run.why + _over(opened)}")


def ending(config: JobConfig, run: RunControl) -> str:
    """Return with which round the workers of a job end that was stopped or suspended, or that its learner does, and
    why."""
    if config.metadata.publishes:
        over = run.reason == LEARNER_HAS_FINISHED
        return run.reason if over else f"{run.why}; its learner publishes no more version"
    what = "version" if config.unit_rounds else "round"
    return f"{run.why}; " + (f"all workers end with {what} {run.round:,}" if run.round else "all workers end")


def _over(job: Job) -> str:
    """Return words for a job in which nothing can change any more."""
    if not job.state().finished(job.config):
        return ""
    return "; but its learner has finished" if job.config.metadata.publishes else "; but all its workers have finished"
