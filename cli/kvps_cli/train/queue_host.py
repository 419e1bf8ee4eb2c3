"""`kvps worker --queue`: serves the queue on this host."""

from __future__ import annotations

import os
from pathlib import Path

from kvps_workers import load_task
from kvps_workers.queue.host import Host
from kvps_workers.queue.queue import CPU, GPU, TaskQueue
from kvps_workers.queue.task_runner import HostResources

from kvps.device.base import open_device
from kvps_cli import connect
from kvps_cli.output import say


def serve(
    server: connect.ServerOptions,
    queue_redis: str | None,
    gpu: int | None,
    burst: bool,
    allow: list[str],
    acks: Path | None,
    quiet: bool,
) -> None:
    """Serve the queue until a signal ends the command, or with `burst` until the queue is empty."""
    environment = dict(os.environ)  # for task processes; copied before open_device binds a device
    open_device(gpu)  # only to check that the device exists
    for task in allow:
        load_task(task)  # a name that cannot be loaded is the operator's mistake: fail now
    name = CPU if gpu is None else GPU
    with connect.serving_store(server, quiet) as store, TaskQueue(queue_redis or store.url, name) as queue:
        if not quiet:
            say(f"serving the queue {name}; Ctrl-C ends it, and its running tasks go back into the queue")
        Host(queue, store, HostResources(environment, tuple(allow), gpu, acks)).serve(burst)
