"""`kvps worker`: one process that trains."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from kvps_workers import load_task
from kvps_workers.training_loop import train

from kvps.device.base import open_device
from kvps.errors import InvalidSetting
from kvps.protocol.keys import check_name
from kvps_cli import completion, connect, options, ports
from kvps_cli.look import metrics
from kvps_cli.output import say, start_log


@options.with_shared
def worker(
    *,
    job: Annotated[
        str | None,
        typer.Option(
            "--job",
            metavar="NAME",
            help="The job to work on.",
            show_default="the only open one",
            autocompletion=completion.jobs,
        ),
    ] = None,
    id: Annotated[
        str | None, typer.Option("--id", help="This worker's id.", show_default="the first free of w0, w1, ...")
    ] = None,
    gpu: Annotated[
        int | None, typer.Option(metavar="N", help="Compute on this CUDA device, with CuPy.", show_default="NumPy")
    ] = None,
    slow: Annotated[
        str, typer.Option(metavar="Nx", help="Slow this worker down, as in 5x, to study stragglers.")
    ] = "1x",
    prefetch: options.Prefetch = False,
    from_queue: Annotated[
        bool,
        typer.Option(
            "--queue", help="Run workers of jobs that kvps submit has put into the queue.", rich_help_panel="Queue"
        ),
    ] = False,
    burst: Annotated[
        bool, typer.Option("--burst", help="With --queue: end when the queue is empty.", rich_help_panel="Queue")
    ] = False,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TASK",
            help="With --queue: train this task too, besides the built-in ones. May be given several times.",
            rich_help_panel="Queue",
        ),
    ] = None,
    queue_redis: options.QueueRedis = None,
    metrics_port: metrics.Port = None,
    metrics_host: metrics.Host = None,
    acks: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Note each acknowledged contribution in this file.", hidden=True),
    ] = None,
    server: connect.ServerOptions,
    quiet: options.Quiet = False,
    verbose: options.Verbose = 0,
) -> None:
    """Train: pull weights, compute gradients, push them, until all rounds are done."""
    if from_queue:
        if metrics_port is not None:
            raise InvalidSetting("--metrics-port is for one job: kvps metrics serves all jobs of the queue")
        _check_for_queue(job=job, id=id, slow=slow != "1x", prefetch=prefetch)
        quiet = start_log(quiet, verbose)
        _serve_queue(server, queue_redis, gpu, burst, allow or [], acks, quiet)
        return
    if burst or allow:
        raise InvalidSetting(f"{'--burst' if burst else '--allow'} is for kvps worker --queue")
    factor = options.parse_slow(slow)
    for kind, name in (("job", job), ("worker", id)):
        if name is not None:
            check_name(kind, name)
    device = open_device(gpu)
    quiet = start_log(quiet, verbose)
    with (
        ports.opened("metrics", metrics.server_of, metrics_port, metrics_host) as scraped,
        connect.serving_store(server, quiet) as store,
    ):
        opened = connect.wait_for_job(store, job, quiet)
        connect.announce(opened, quiet)
        with metrics.serving(scraped, store, opened.name):
            train(opened, device, id, factor, acks, prefetch)
        if not quiet:
            say(f"job {opened.name}: this worker has done its rounds")


def _check_for_queue(**given: object) -> None:
    for name, value in given.items():
        if value:
            raise InvalidSetting(f"leave out --{name} with --queue: kvps submit decides what each worker does")


def _serve_queue(
    server: connect.ServerOptions,
    queue_redis: str | None,
    gpu: int | None,
    burst: bool,
    allow: list[str],
    acks: Path | None,
    quiet: bool,
) -> None:
    """Serve the queue until a signal ends the command, or with `burst` until the queue is empty."""
    from kvps_workers.queue.host import Host
    from kvps_workers.queue.queue import CPU, GPU, TaskQueue
    from kvps_workers.queue.task_runner import HostResources

    environment = dict(os.environ)  # for task processes; copied before open_device binds a device
    open_device(gpu)  # only to check that the device exists
    for task in allow:
        load_task(task)  # a name that cannot be loaded is the operator's mistake: fail now
    name = CPU if gpu is None else GPU
    with connect.serving_store(server, quiet) as store, TaskQueue(queue_redis or store.url, name) as queue:
        if not quiet:
            say(f"serving the queue {name}; Ctrl-C ends it, and its running tasks go back into the queue")
        Host(queue, store, HostResources(environment, tuple(allow), gpu, acks)).serve(burst)
