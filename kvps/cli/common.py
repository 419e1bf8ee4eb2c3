"""What the commands share: their options, the way to a server, and how they speak."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from functools import wraps
from inspect import Signature, signature
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from kvps_aggregator.checkpoints import Checkpoints
from kvps_aggregator.verify.recording import check_directory
from kvps_workers import Task
from kvps_workers.training_loop import rounds_of

import kvps
from kvps import optimizers
from kvps.config import JobConfig
from kvps.connection.sockets import redacted
from kvps.errors import InvalidSetting, JobNotFound, KvpsError, NoServer, ServerLost
from kvps.job import Job, readable
from kvps.protocol.job_state import State
from kvps.server import private_server
from kvps.store import Store

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
# Gradients of several workers at once: one thread each, or their thread pools fight for the cores.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

Prefetch = Annotated[
    bool,
    typer.Option("--prefetch", help="In SSP and ASP: let the next weights come while a worker computes."),
]

DataDir = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Have the private server keep its data there, and go on from them.  (default: it keeps nothing)",
    ),
]
NewJobName = Annotated[
    str | None, typer.Option("--job", metavar="NAME", help="Name of the job.  (default: the task's)")
]
Slow = Annotated[
    list[str] | None,
    typer.Option(metavar="ID=Nx", help="Slow a worker down, as in w0=5x; may be given several times."),
]
TaskName = Annotated[
    str, typer.Argument(metavar="TASK", help="digits, or module:attribute of a module in this directory.")
]
JobName = Annotated[str, typer.Argument(metavar="JOB", help="Name of the job.")]
Record = Annotated[
    Path | None,
    typer.Option("--record", metavar="DIR", help="Keep every contribution in a file there, for kvps verify --record."),
]

DEFAULT_CHECKPOINTS = Path("checkpoints")
CheckpointEvery = Annotated[
    int | None,
    typer.Option(
        "--checkpoint-every",
        metavar="N",
        help="Write a checkpoint after every N-th version and after the last, and move the commit log to it.",
    ),
]
CheckpointDirectory = Annotated[Path, typer.Option("--checkpoints", metavar="DIR", help="Where checkpoints go.")]
Keep = Annotated[int, typer.Option(metavar="K", help="How many checkpoints of a job are kept.")]


def checkpoints_of(every: int | None, directory: Path, keep: int) -> Checkpoints | None:
    """What these options say; None if no checkpoints are written. Raises InvalidSetting."""
    for option, number in (("--checkpoint-every", every), ("--keep", keep)):
        if number is not None and number < 1:
            raise InvalidSetting(f"{option} must be 1 or more, not {number}")
    return None if every is None else Checkpoints(check_directory(directory, "--checkpoints"), every, keep)


_CALLED = {"worker_timeout": "worker_timeout_ms", "lease": "lease_ms", "lr": "optimizer"}  # by JobConfig


def kept_options(record: Path | None, saving: Checkpoints | None) -> list[str]:
    """How an aggregator is told of a record and of checkpoints. Raises InvalidSetting for a record that cannot be."""
    options = ["--record", str(check_directory(record))] if record is not None else []
    if saving:
        options += ["--checkpoint-every", str(saving.every), "--checkpoints", str(saving.directory)]
        options += ["--keep", str(saving.keep)]
    return options


def check_prefetch(prefetch: bool, config: JobConfig) -> None:
    """Raise InvalidSetting for --prefetch where it can do nothing."""
    if prefetch and not config.staleness:
        raise InvalidSetting("--prefetch is for SSP and ASP (--staleness): in BSP nothing is there to fetch ahead")


@dataclass(frozen=True)
class JobSettings:
    """Settings of a new job, whatever it trains, as options of a command, see `with_settings`."""

    workers: Annotated[int, typer.Option("--workers", "-w", help="How many workers train.")] = 3
    staleness: Annotated[int, typer.Option("--staleness", "-s", help="0 is BSP, N is SSP, -1 is ASP.")] = 0
    shards: Annotated[int, typer.Option(help="Into how many parts the parameters are cut.")] = 1
    optimizer: Annotated[
        str,
        typer.Option(
            "--optimizer",
            metavar="NAME[:K=V,...]",
            help="sgd, adagrad, adam or adamw, as in sgd:momentum=0.9,nesterov=true.",
        ),
    ] = "sgd"
    lr: Annotated[float | None, typer.Option("--lr", help="Learning rate.  (default: the optimizer's)")] = None
    seed: Annotated[int, typer.Option(help="For the initial parameters and the order of the samples.")] = 0
    reduction: Annotated[str, typer.Option(help="mean or sum of the contributions.")] = "mean"
    gradient_format: Annotated[
        str,
        typer.Option(
            metavar="FORMAT",
            help="How gradients travel: fp32 as they are, or shorter: bf16, fp16, int8, topk:PART. What a shorter one "
            "leaves out of a gradient goes with the next. A shorter one is for slow links: on one host it costs "
            "computing, and fp32 is faster.",
        ),
    ] = "fp32"
    weight_format: Annotated[
        str, typer.Option(metavar="FORMAT", help="How workers pull the weights: fp32 as they are, or bf16.")
    ] = "fp32"
    transport: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="How arrays move: redis; shm, through memory that worker and aggregator share on one host; auto: shm "
            "for models from 1 MiB on, on a server that only this host can reach.",
        ),
    ] = "auto"
    mirror_every: Annotated[
        str,
        typer.Option(
            metavar="N|SECONDS", help="Over shm, how often Redis is given the weights: 10 (versions) or 0.5s."
        ),
    ] = "1s"
    nonfinite: Annotated[
        str, typer.Option("--nonfinite", help="A gradient with NaN or Inf: reject it, or skip (count as zeros).")
    ] = "reject"
    min_workers: Annotated[int, typer.Option(help="With fewer workers left the job pauses.")] = 0
    worker_timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="Silence after which a worker is evicted.")
    ] = 10.0
    lease: Annotated[
        float, typer.Option(metavar="SECONDS", help="Silence after which an aggregator loses its shards.")
    ] = 3.0

    def given(self, options: Iterable[str]) -> dict[str, Any]:
        """What these options say, under the names of JobConfig. Raises InvalidSetting."""
        return {_CALLED.get(option, option): self._value(option) for option in options}

    def _value(self, option: str) -> Any:
        if option in ("optimizer", "lr"):
            return optimizers.parse(self.optimizer, self.lr)
        value = getattr(self, option)
        return _milliseconds(f"--{option.replace('_', '-')}", value) if option in ("worker_timeout", "lease") else value


@dataclass(frozen=True)
class Settings(JobSettings):
    """A new job's settings and what it trains on, as options of a command."""

    lr: Annotated[
        float | None,
        typer.Option("--lr", help="Learning rate.  (default: the task's for sgd, else the optimizer's)"),
    ] = None
    batch_size: Annotated[
        int | None, typer.Option(help="Samples a worker takes for one gradient.  (default: the task's)")
    ] = None
    epochs: Annotated[int | None, typer.Option(help="Passes over the data.  (default: the task's)")] = None
    data: Annotated[
        str,
        typer.Option(
            help="static: each worker has a part of the samples of its own; units: they are handed out batch by batch, "
            "and each counts once an epoch, whoever dies."
        ),
    ] = "static"

    def job_config(self, name: str, task: Task) -> JobConfig:
        """The settings of a job that trains a task; what the user left out is the task's choice."""
        for option, value in (("--batch-size", self.batch_size), ("--epochs", self.epochs)):
            if value is not None and value < 1:
                raise InvalidSetting(f"{option} must be 1 or more, not {value}")
        if self.data not in ("static", "units"):
            raise InvalidSetting(f"--data must be static or units, not {self.data!r}")
        told = self
        if self.lr is None and self.optimizer.startswith("sgd") and "lr=" not in self.optimizer:
            told = replace(self, lr=task.lr)  # a task knows a good rate for plain SGD; the other optimizers have theirs
        chosen = told.given(option.name for option in fields(JobSettings))
        chosen["batch_size"] = self.batch_size or task.batch_size
        chosen["epochs"] = self.epochs or task.epochs
        if self.data == "units":
            chosen["units"] = rounds_of(len(task.data(0, 1, np)[0]), chosen["batch_size"], chosen["epochs"])
        return JobConfig(task=name, **chosen)


def _milliseconds(option: str, seconds: float) -> int:
    if not 0.1 <= seconds <= 86_400:
        raise InvalidSetting(f"{option} must be from 0.1 to 86400 seconds, not {seconds:g}")
    return round(seconds * 1000)


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command that takes `settings: Settings` (or JobSettings) have an option for each of them in its place."""
    taken = signature(command, eval_str=True).parameters
    kind = taken["settings"].annotation
    options = [p.replace(kind=p.KEYWORD_ONLY) for p in signature(kind, eval_str=True).parameters.values()]

    @wraps(command)
    def run(**given: Any) -> None:
        command(settings=kind(**{o.name: given.pop(o.name) for o in options}), **given)

    own = [p.replace(kind=p.KEYWORD_ONLY) for p in taken.values()]
    shown = [option for p in own for option in (options if p.name == "settings" else [p])]
    run.__signature__ = Signature(shown)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in shown}
    return run


@contextmanager
def serving_store(
    redis: str | None,
    listen: str | None = None,
    data_dir: Path | None = None,
    quiet: bool = False,
    joinable: bool = True,
) -> Iterator[Store]:
    """A store for a command that starts something: it may start the private server, and says how to look inside.

    With `joinable` workers may come from elsewhere, and it says how.
    """
    if redis and (listen or data_dir):
        option = "--listen" if listen else "--data-dir"
        raise InvalidSetting(f"{option} is for the private server: leave it out with --redis")
    with kvps.connect(redis, listen, data_dir) as store:
        if not quiet:
            what = "private server" if redis is None else "server"
            say(f"{what} {store.server_name} at {redacted(store.url)}{_end_of(store)}")
            say(f"look inside: {'kvps cli' if redis is None else f'kvps cli --redis {redacted(redis)}'}")
            if listen and joinable:
                say(f"join from elsewhere: {private_server.join_line(store.url, listen)}")
            elif listen:
                say(f"look from elsewhere: KVPS_REDIS_URL={private_server.tcp_url(store.url, listen)} kvps jobs")
        lost = False
        try:
            yield store
        except (NoServer, ServerLost):
            lost = True
            raise
        finally:
            if not lost:
                _say_what_goes_on(store)


def _end_of(store: Store) -> str:
    return " (ends when nobody uses it)" if store.ends_unused else ""


def _say_what_goes_on(store: Store) -> None:
    """Say that the server which this command started goes on for others, if it does."""
    if not store.hands_over_server:
        return
    with suppress(KvpsError):  # it has ended meanwhile
        jobs = ", ".join(at_work(store))
        say(f"the private server goes on for others{f' ({jobs})' if jobs else ''}: kvps server stop ends it")


def at_work(store: Store) -> list[str]:
    """The jobs that have workers at work."""
    found = all_jobs(store, set())
    return [job.name for job, state in found if any(member.active for member in state.members.values())]


@contextmanager
def existing_store(redis: str | None) -> Iterator[Store]:
    """A store for a command that looks at what is there, and starts nothing."""
    url = redis or private_server.running()
    if url is None:
        raise NoServer("no private server runs: start one with kvps up, kvps aggregator start or kvps server start")
    with kvps.connect(url) as store:
        yield store


def wait_for_server(redis: str | None) -> None:
    """Wait until the private server runs, saying so once. With a URL there is nothing to wait for."""
    if redis or private_server.running():
        return
    say("no private server runs yet: waiting for kvps aggregator start, kvps worker or kvps server start")
    while not private_server.running():
        time.sleep(_LOOK_AGAIN_S)  # nobody can ring a bell that does not exist yet


def wait_for_job(store: Store, name: str | None, quiet: bool = False) -> Job:
    """The job of that name, or the only one that is open to all; waits for it, saying so once.

    Raises InvalidSetting if several are open.
    """
    said, passed_over = False, set[str]()
    while True:
        if name is not None:
            with suppress(JobNotFound):
                return read_job(store, name)[0]
        else:
            jobs = all_jobs(store, passed_over)
            found = [j for j, state in jobs if j.config.task and not j.launcher and not state.finished(j.config)]
            if len(found) == 1:
                return found[0]
            if found:
                raise InvalidSetting(
                    f"several jobs are open ({', '.join(j.name for j in found)}): say which with --job"
                )
        if not said and not quiet:
            wanted = f"job {name!r}" if name else "a job"
            say(f"waiting for {wanted}: kvps create TASK --job {name or 'NAME'}")
            said = True
        time.sleep(_LOOK_AGAIN_S)  # the set of jobs has no bell: it is for listing only


def all_jobs(store: Store, passed_over: set[str]) -> Iterator[tuple[Job, State]]:
    """Every job of the server, and its state. Why one cannot be read is said, once, and noted in `passed_over`."""
    for name in store.jobs():
        try:
            found = read_job(store, name)
        except JobNotFound:
            continue  # removed meanwhile
        except (NoServer, ServerLost):
            raise
        except KvpsError as error:
            if str(error) not in passed_over:
                passed_over.add(str(error))
                say(f"passed over: {error}")
            continue
        yield found


def read_job(store: Store, name: str) -> tuple[Job, State]:
    """The job of that name, and its state. Raises JobNotFound, CorruptData."""
    with readable(name):
        job = store.job(name)
        return job, job.state()


def say(message: str) -> None:
    """One line for a person, at once."""
    print(message, file=sys.stderr, flush=True)


def log_to_stderr(quiet: bool) -> None:
    """Show what the parts log: all that changes hands, or with `quiet` only what is wrong."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING if quiet else logging.INFO, stream=sys.stderr)
