"""What the commands share: their options, the way to a server, and how they speak."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from kvps_workers import Task

import kvps
from kvps import embedded, optim
from kvps.config import JobConfig
from kvps.errors import InvalidSetting, JobNotFound, KvpsError, NoServer
from kvps.job import Job
from kvps.store import Store
from kvps.transport import redacted

_LOOK_AGAIN_S = 0.3

Redis = Annotated[
    str | None,
    typer.Option(
        "--redis",
        envvar="KVPS_REDIS_URL",
        metavar="URL",
        help="Redis to use (redis://, rediss://, unix://). Without it: your own private server, started if need be.",
    ),
]
Listen = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="Let the private server listen on TCP too, behind a password, for workers on other machines.",
    ),
]
TaskName = Annotated[
    str, typer.Argument(metavar="TASK", help="digits, or module:attribute of a module in this directory.")
]
JobName = Annotated[str, typer.Argument(metavar="JOB", help="Name of the job.")]
Workers = Annotated[int, typer.Option("--workers", "-w", help="How many workers train.")]
Staleness = Annotated[int, typer.Option("--staleness", "-s", help="0 is BSP, N is SSP, -1 is ASP.")]
Shards = Annotated[int, typer.Option(help="Into how many parts the parameters are cut.")]
OptimizerName = Annotated[
    str,
    typer.Option(
        "--optimizer",
        metavar="NAME[:K=V,...]",
        help="sgd, adagrad, adam or adamw, as in sgd:momentum=0.9,nesterov=true.",
    ),
]
LearningRate = Annotated[
    float | None,
    typer.Option("--lr", help="Learning rate.  (default: the task's for sgd, else the optimizer's)"),
]
BatchSize = Annotated[int | None, typer.Option(help="Samples a worker takes for one gradient.  (default: the task's)")]
Epochs = Annotated[int | None, typer.Option(help="Passes over the data.  (default: the task's)")]
Seed = Annotated[int, typer.Option(help="For the initial parameters and the order of the samples.")]
Reduction = Annotated[str, typer.Option(help="mean or sum of the contributions.")]
NonFinite = Annotated[
    str, typer.Option("--nonfinite", help="A gradient with NaN or Inf: reject it, or skip (count as zeros).")
]


def job_config(
    task_name: str,
    task: Task,
    *,
    workers: int,
    staleness: int,
    shards: int,
    optimizer: str,
    lr: float | None,
    batch_size: int | None,
    epochs: int | None,
    seed: int,
    reduction: str,
    nonfinite: str,
) -> JobConfig:
    """The settings of a job that trains a task; what the user left out is the task's choice."""
    for name, value in (("--batch-size", batch_size), ("--epochs", epochs)):
        if value is not None and value < 1:
            raise InvalidSetting(f"{name} must be 1 or more, not {value}")
    if lr is None and optimizer.startswith("sgd") and "lr=" not in optimizer:
        lr = task.lr  # a task knows a good rate for plain SGD; the other optimizers have theirs
    return JobConfig(
        task=task_name,
        workers=workers,
        staleness=staleness,
        shards=shards,
        optimizer=optim.parse(optimizer, lr),
        batch_size=batch_size or task.batch_size,
        epochs=epochs or task.epochs,
        seed=seed,
        reduction=reduction,
        nonfinite=nonfinite,
    )


def create_job(store: Store, name: str, task: Task, config: JobConfig) -> Job:
    """Make a job that trains a task."""
    return store.create_job(name, task.parameters(config.seed), config=config)


@contextmanager
def serving_store(redis: str | None, listen: str | None = None, quiet: bool = False) -> Iterator[Store]:
    """A store for a command that starts something: it may start the private server, and says how to look inside."""
    if redis and listen:
        raise InvalidSetting("--listen is for the private server: leave it out with --redis")
    with kvps.connect(redis, listen) as store:
        if not quiet:
            what = "private server" if redis is None else "server"
            say(f"{what} {redacted(store.url)}{_end_of(store)}")
            say(f"look inside: {'kvps cli' if redis is None else f'kvps cli --redis {redacted(redis)}'}")
            if listen:
                say(f"join from elsewhere: {embedded.join_line(store.url, listen)}")
        try:
            yield store
        except KvpsError as error:
            _leave(store, error)
            raise
        _leave(store)


def _end_of(store: Store) -> str:
    if store.started_server:
        return " (ends with this command)"
    return " (ends with the command that started it)" if store.borrowed_server else ""


def _leave(store: Store, error: KvpsError | None = None) -> None:
    """Close the store; a server that ends with it is not taken from others while they use it."""
    said = False
    while not store.close_unless_used():
        if not said:
            failed = f"{error}; " if error else ""
            say(f"{failed}the private server is used by others: waiting for them (Ctrl-C ends it)")
            said = True
        time.sleep(_LOOK_AGAIN_S)  # a client that leaves rings no bell


@contextmanager
def existing_store(redis: str | None) -> Iterator[Store]:
    """A store for a command that looks at what is there, and starts nothing."""
    url = redis or embedded.running()
    if url is None:
        raise NoServer("no private server runs: start one with kvps up, kvps aggregator start or kvps server start")
    with kvps.connect(url) as store:
        yield store


def wait_for_server(redis: str | None) -> None:
    """Wait until the private server runs, saying so once. With a URL there is nothing to wait for."""
    if redis or embedded.running():
        return
    say("no private server runs yet: waiting for kvps aggregator start, kvps worker or kvps server start")
    while not embedded.running():
        time.sleep(_LOOK_AGAIN_S)  # nobody can ring a bell that does not exist yet


def wait_for_job(store: Store, name: str | None) -> Job:
    """The job of that name, or the only open one; waits for it, saying so once. Raises InvalidSetting for several."""
    said = False
    while True:
        if name is not None:
            try:
                return store.job(name)
            except JobNotFound:
                pass
        else:
            found = [job for job in open_jobs(store) if job.config.task]
            if len(found) == 1:
                return found[0]
            if found:
                raise InvalidSetting(
                    f"several jobs are open ({', '.join(j.name for j in found)}): say which with --job"
                )
        if not said:
            wanted = f"job {name!r}" if name else "a job"
            say(f"waiting for {wanted}: kvps create TASK --job {name or 'NAME'}")
            said = True
        time.sleep(_LOOK_AGAIN_S)  # the set of jobs has no bell: it is for listing only


def open_jobs(store: Store) -> list[Job]:
    """All jobs that are not finished."""
    found = []
    for name in store.jobs():
        try:
            job = store.job(name)
            if not job.state().finished(job.config.workers):
                found.append(job)
        except JobNotFound:
            continue
    return found


def say(message: str) -> None:
    """One line for a person, at once."""
    print(message, file=sys.stderr, flush=True)


def log_to_stderr(quiet: bool) -> None:
    """Show what the parts log: all that changes hands, or with `quiet` only what is wrong."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING if quiet else logging.INFO, stream=sys.stderr)
