"""Jobs handed out to hosts: `submit`, `queue` and `cancel`. What a host does is `kvps.cli.host`."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any

import typer
from kvps_workers import load_task

from kvps.cli import connect, options
from kvps.cli.host import QueueRedis, opened
from kvps.cli.output import print_json, print_rows, say
from kvps.errors import KvpsError
from kvps.protocol.keys import check_name

if TYPE_CHECKING:  # RQ takes its time to load, and few commands need it
    from kvps_workers.queue.queue import QueueRow


@options.with_settings
def submit(
    task: options.TaskName,
    settings: options.Settings,
    job: options.NewJobName = None,
    slow: options.Slow = None,
    prefetch: options.Prefetch = False,
    gpus: Annotated[bool, typer.Option("--gpus", help="For hosts with a GPU: kvps worker --queue --gpu N.")] = False,
    queue_redis: QueueRedis = None,
    redis: options.Redis = None,
) -> None:
    """Create a job and put its workers into the queue, for hosts that are free: kvps worker --queue."""
    from kvps_workers.queue.queue import CPU, GPU

    factors = options.slow_factors(slow or [], settings.workers)
    if job is not None:
        check_name("job", job)
    found = load_task(task)
    config = settings.job_config(task, found)
    options.check_prefetch(prefetch, config)
    params = found.parameters(config.seed)
    connect.wait_for_server(redis)
    with connect.existing_store(redis) as store, opened(store, queue_redis, GPU if gpus else CPU) as queue:
        hosts = queue.hosts()  # before anything is stored: the queue may be on a server that is away
        name = job or store.free_name(task.rpartition(":")[2])
        made = store.create_job(name, params, config=config)
        try:
            queue.submit(made, factors, prefetch)
        except KvpsError:
            store.remove_job(name)
            raise
    say(f"job {name}: {task}, {config.mode}, {config.workers} workers, {config.optimizer}")
    start = f"kvps worker --queue{' --gpu N' if gpus else ''}"
    if hosts < config.workers:
        say(f"it begins when {config.workers} hosts serve the queue {queue.name}; now {hosts} do: {start}")
    say(f"look: kvps queue, kvps status {name}; end it: kvps cancel {name}")


def show(as_json: options.AsJson = False, queue_redis: QueueRedis = None, redis: options.Redis = None) -> None:
    """Show which tasks run, which wait for a host, and which failed."""
    from kvps_workers.queue.queue import QUEUES

    tasks, served = list[dict[str, Any]](), list[str]()
    hosts = dict[str, int]()
    with connect.existing_store(redis) as store:
        for name in QUEUES:
            with opened(store, queue_redis, name) as queue:
                hosts[name], rows = queue.look()
            tasks += [_described(name, row) for row in rows]
            if rows or hosts[name]:
                served.append(f"{name}: {_served(rows, hosts[name])}")
    if as_json:
        print_json({"hosts": hosts, "tasks": tasks})
        return
    if tasks:
        columns = ("job", "worker", "queue", "state", "")
        shown = [(t["job"], t["worker"] or "-", t["queue"], t["state"], t["host"] or t["reason"]) for t in tasks]
        print_rows(columns, shown)
    for line in served:
        print(line)
    if not served:
        say("nothing is queued: kvps submit TASK --workers W")


def _described(queue: str, row: QueueRow) -> dict[str, Any]:
    """One task of a queue as JSON. `host` is where it runs, `reason` why it failed; a foreign RQ job has its RQ id."""
    job, worker = (row.task.job, row.task.worker) if row.task else (row.id, None)
    host = row.host if row.state == "runs" else None
    return {"job": job, "worker": worker, "queue": queue, "state": row.state, "host": host, "reason": row.why}


def cancel(job: options.JobName, queue_redis: QueueRedis = None, redis: options.Redis = None) -> None:
    """Take a job's workers out of the queue, and have those that run leave. The job and its weights stay."""
    from kvps_workers.queue.queue import QUEUES

    check_name("job", job)
    waited = running = 0
    with connect.existing_store(redis) as store:
        for name in QUEUES:
            with opened(store, queue_redis, name) as queue:
                counts = queue.cancel(job)
                waited, running = waited + counts[0], running + counts[1]
    if not waited and not running:
        raise KvpsError(f"nothing of job {job!r} waits or runs: kvps queue shows what does")
    say(f"job {job}: {waited} taken out of the queue, {running} told to leave")
    say(f"what it has learnt stays: kvps worker --job {job} goes on with it, kvps rm {job} removes it")


def _served(rows: list[QueueRow], hosts: int) -> str:
    """How many hosts serve a queue, and which jobs wait for more of them."""
    line = f"{hosts} host{'' if hosts == 1 else 's'}"
    needed = Counter(row.task.job for row in rows if row.task and row.state != "failed")
    waiting = {row.task.job for row in rows if row.task and row.state == "waits"}
    if wide := [f"{job} ({needed[job]})" for job in sorted(waiting) if needed[job] > hosts]:
        line += f"; more hosts than that are needed by {', '.join(wide)}: kvps worker --queue"
    return line
