"""The parts by hand: create, aggregator start, worker. In any order, on any machines; who is early waits."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from kvps_aggregator import serve
from kvps_aggregator.checkpoints import Checkpoints
from kvps_aggregator.job_watcher import JobWatcher
from kvps_aggregator.verify.recording import check_directory
from kvps_workers import load_task
from kvps_workers.training_loop import train

from kvps.cli import common, host, options
from kvps.cli.common import say
from kvps.device.base import CPU, Device, open_device
from kvps.errors import InvalidSetting
from kvps.job import Job
from kvps.protocol.keys import check_name
from kvps.store import Store

Quiet = Annotated[bool, typer.Option("--quiet", hidden=True)]

aggregator = typer.Typer(help="The process that averages gradients and commits weights.", no_args_is_help=True)


@options.with_settings
def create(
    task: options.TaskName,
    job: Annotated[str, typer.Option("--job", metavar="NAME", help="Name of the new job.")],
    settings: options.Settings,
    redis: options.Redis = None,
) -> None:
    """Create a job, for aggregators and workers that run already or will be started."""
    check_name("job", job)
    found = load_task(task)
    config = settings.job_config(task, found)
    params = found.parameters(config.seed)
    common.wait_for_server(redis)
    with common.existing_store(redis) as store:
        store.create_job(job, params, config=config)
    say(f"job {job}: {task}, {config.mode}, {config.workers} workers, {config.optimizer}")


@aggregator.callback()
def _aggregator() -> None:
    """The process that averages gradients and commits weights."""


@aggregator.command("start")
def start(
    job: Annotated[
        str | None,
        typer.Option("--job", metavar="NAME", help="Serve this job until it is finished.  (default: every job)"),
    ] = None,
    record: options.Record = None,
    checkpoint_every: options.CheckpointEvery = None,
    checkpoints: options.CheckpointDirectory = options.DEFAULT_CHECKPOINTS,
    keep: options.Keep = 3,
    gpu: Annotated[
        int | None,
        typer.Option(metavar="N", help="Reduce and step on this CUDA device, with CuPy.  (default: NumPy)"),
    ] = None,
    memory_lost: Annotated[
        bool,
        typer.Option(
            "--memory-lost",
            help="With --job: the host or container whose shared memory held the job's arrays was restarted, or is "
            "gone: go on here, from the version that Redis has.",
        ),
    ] = False,
    redis: options.Redis = None,
    listen: options.Listen = None,
    data_dir: options.DataDir = None,
    quiet: Quiet = False,
) -> None:
    """Serve a job until it is finished, or every job, later ones too, until stopped.

    Start as many as you like: one holds each shard, the others stand by and take over.
    """
    if job is not None:
        check_name("job", job)
    elif memory_lost:
        raise InvalidSetting("--memory-lost is for one job, whose memory is surely lost: give its name with --job")
    if record is not None:
        record = check_directory(record)
    saving = options.checkpoints_of(checkpoint_every, checkpoints, keep)
    device = open_device(gpu)
    common.log_to_stderr(quiet)
    with common.serving_store(redis, listen, data_dir, quiet) as store:
        if job is None:
            _serve_all(store, record, saving, device)
        else:
            found = common.wait_for_job(store, job, quiet)
            _announce(found, quiet)
            serve(found, record=record, checkpoints=saving, device=device, memory_lost=memory_lost)
            if not quiet:
                say(f"job {found.name}: finished")


def worker(
    job: Annotated[
        str | None,
        typer.Option("--job", metavar="NAME", help="The job to work on.  (default: the only open one)"),
    ] = None,
    id: Annotated[
        str | None, typer.Option("--id", help="This worker's id.  (default: the first free of w0, w1, ...)")
    ] = None,
    gpu: Annotated[
        int | None,
        typer.Option(metavar="N", help="Compute on this CUDA device, with CuPy.  (default: NumPy)"),
    ] = None,
    slow: Annotated[
        str, typer.Option(metavar="Nx", help="Stretch this worker's steps, as in 5x, to study stragglers.")
    ] = "1x",
    prefetch: options.Prefetch = False,
    from_queue: Annotated[
        bool, typer.Option("--queue", help="Take workers of any job from the queue, see kvps submit.")
    ] = False,
    burst: Annotated[bool, typer.Option("--burst", help="With --queue: end when the queue is empty.")] = False,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TASK",
            help="With --queue: train this task too, besides the built-in ones; may be given several times.",
        ),
    ] = None,
    queue_redis: host.QueueRedis = None,
    acks: Annotated[Path | None, typer.Option(hidden=True)] = None,
    redis: options.Redis = None,
    listen: options.Listen = None,
    data_dir: options.DataDir = None,
    quiet: Quiet = False,
) -> None:
    """Train: pull weights, compute gradients, push them, until all rounds are done."""
    if from_queue:
        _check_for_queue(job=job, id=id, slow=slow != "1x", prefetch=prefetch)
        common.log_to_stderr(quiet)
        host.serve(gpu, burst, allow or [], acks, queue_redis, redis, listen, data_dir)
        return
    if burst or allow:
        raise InvalidSetting(f"{'--burst' if burst else '--allow'} is for kvps worker --queue")
    factor = options.parse_slow(slow)
    for kind, name in (("job", job), ("worker", id)):
        if name is not None:
            check_name(kind, name)
    device = open_device(gpu)
    common.log_to_stderr(quiet)
    with common.serving_store(redis, listen, data_dir, quiet) as store:
        found = common.wait_for_job(store, job, quiet)
        _announce(found, quiet)
        train(found, device, id, factor, acks, prefetch)
        if not quiet:
            say(f"job {found.name}: this worker has done its rounds")


def _check_for_queue(**given: object) -> None:
    for name, value in given.items():
        if value:
            raise InvalidSetting(f"--{name} does not go with --queue: what a worker does is said by kvps submit")


def _announce(job: Job, quiet: bool) -> None:
    if not quiet:
        c = job.config
        say(f"job {job.name}: {c.task or 'made in Python'}, {c.mode}, {c.workers} workers, {c.optimizer}")


def _serve_all(
    store: Store, record: Path | None = None, checkpoints: Checkpoints | None = None, device: Device = CPU
) -> None:
    say("serving every job of this server; Ctrl-C ends it")
    JobWatcher(store, say, partial(_announce, quiet=False), record, checkpoints, device).run()
