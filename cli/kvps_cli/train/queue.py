"""`kvps submit`, `kvps queue` and `kvps cancel`: jobs for hosts that serve a queue (`kvps worker --queue`)."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Any

import typer
from kvps_workers import load_task
from kvps_workers.queue.queue import CPU, GPU, QUEUES, QueueRow, TaskQueue
from kvps_workers.queue.worker_task import is_optional

from kvps.errors import KvpsError, counted
from kvps.protocol.keys import check_name, check_new_name
from kvps_cli import connect, options
from kvps_cli.new_job import create_job, parameters_of
from kvps_cli.output import print_json, say
from kvps_cli.tables import print_rows
from kvps_cli.train.settings import TaskOptions, check_prefetch


@options.with_shared
def submit(
    task: options.TaskName,
    settings: TaskOptions,
    job: options.NewJobName = None,
    slow: options.Slow = None,
    prefetch: options.Prefetch = False,
    gpus: Annotated[bool, typer.Option("--gpus", help="Use hosts that run kvps worker --queue --gpu N.")] = False,
    queue_redis: options.QueueRedis = None,
    redis: options.Redis = None,
) -> None:
    """Create a job and put its workers into the queue. Hosts that run kvps worker --queue take them."""
    factors = options.slow_factors(slow or [], settings.most)
    if job is not None:
        check_new_name("job", job)
    loaded = load_task(task)
    config = settings.job_config(task, loaded, quiet=False)
    check_prefetch(prefetch, config)
    params = parameters_of(loaded, config, quiet=False)
    connect.wait_for_server(redis)
    with connect.existing_store(redis) as store, TaskQueue(queue_redis or store.url, GPU if gpus else CPU) as queue:
        hosts = queue.hosts()  # asked before anything is stored, because the queue's server may be down
        name = job or store.free_name(task.rpartition(":")[2])
        created = create_job(store, name, params, config, quiet=False)
        try:
            queue.submit(created, factors, prefetch, settings.most)
        except KvpsError:
            store.remove_job(name)
            raise
    connect.announce(created)
    start = f"kvps worker --queue{' --gpu N' if gpus else ''}"
    if hosts < config.workers:
        needed = counted(config.workers, "host")
        say(f"it begins with {needed} at the queue {queue.name}, where {hosts} are now; start more: {start}")
    if settings.elastic:
        say(f"up to {settings.most} hosts train it while no other job needs them")
    say(f"watch it with kvps queue or kvps status {name}; end it with kvps cancel {name}")


def show(as_json: options.AsJson = False, queue_redis: options.QueueRedis = None, redis: options.Redis = None) -> None:
    """Show which tasks run, which wait for a host, and which failed."""
    tasks, served = list[dict[str, Any]](), list[str]()
    hosts = dict[str, int]()
    with connect.existing_store(redis) as store:
        for name in QUEUES:
            with TaskQueue(queue_redis or store.url, name) as queue:
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
        say("nothing is queued; submit a job with kvps submit TASK --workers W")


def _described(queue: str, row: QueueRow) -> dict[str, Any]:
    """Return a task as JSON: `host` runs it, `reason` says why it failed. A foreign RQ job has its RQ id as `job`."""
    job, worker = (row.task.job, row.task.worker) if row.task else (row.id, None)
    host = row.host if row.state == "runs" else None
    reason = row.why or ("if a host is free" if row.state == "waits" and is_optional(row.id) else "")
    return {"job": job, "worker": worker, "queue": queue, "state": row.state, "host": host, "reason": reason}


def cancel(job: options.JobName, queue_redis: options.QueueRedis = None, redis: options.Redis = None) -> None:
    """Take a job's workers out of the queue, and tell running ones to leave. The job and its weights stay."""
    check_name("job", job)
    waited = running = 0
    with connect.existing_store(redis) as store:
        for name in QUEUES:
            with TaskQueue(queue_redis or store.url, name) as queue:
                counts = queue.cancel(job)
                waited, running = waited + counts[0], running + counts[1]
    if not waited and not running:
        raise KvpsError(f"no worker of job {job!r} waits in the queue or runs; kvps queue shows those that do")
    say(f"job {job}: {waited} taken out of the queue, {running} told to leave")
    say(f"the job's weights stay; continue with kvps worker --job {job}, or remove the job with kvps rm {job}")


def _served(rows: list[QueueRow], hosts: int) -> str:
    """Return a line that says how many hosts serve a queue, and which jobs need more."""
    line = counted(hosts, "host")
    rows = [row for row in rows if not is_optional(row.id)]
    needed = Counter(row.task.job for row in rows if row.task and row.state != "failed")
    waiting = {row.task.job for row in rows if row.task and row.state == "waits"}
    if wide := [f"{job} ({needed[job]})" for job in sorted(waiting) if needed[job] > hosts]:
        line += f"; more hosts are needed by {', '.join(wide)}: start them with kvps worker --queue"
    return line
