"""Hand a job to free hosts (`kvps worker --queue`, and a `kvps aggregator start`), and wait for its weights."""

import sys
import time

import numpy as np
from kvps_monitor.job_now import JobNow
from kvps_workers import load_task
from kvps_workers.queue.queue import CPU, TaskQueue

import kvps

task = load_task("digits")
settings = {"workers": 2, "batch_size": task.batch_size, "epochs": 10, "optimizer": kvps.SGD(lr=task.lr)}


def wait_for(job, queue):
    """Wait until the job is finished. After two seconds, say once what is missing."""
    says_at = time.monotonic() + 2
    while not (state := job.state()).finished(job.config):
        if time.monotonic() > says_at:
            says_at = float("inf")
            if not queue.hosts():
                print("waits: no host takes tasks: kvps worker --queue")
            if not any(JobNow.read(job, state).holders):
                print("waits: nobody serves the job: kvps aggregator start")
        time.sleep(0.1)


with kvps.connect() as store, TaskQueue(store.url, CPU) as queue:  # or connect("redis://host:6379")
    job = store.create_job(store.free_name("from-python"), task.parameters(seed=0), task="digits", **settings)
    queue.submit(job)
    print(f"submitted {job.name}; hosts at the queue: {queue.hosts()}")
    try:
        wait_for(job, queue)
    except KeyboardInterrupt:
        queue.cancel(job.name)
        sys.exit(f"interrupted: {job.name} is cancelled")
    version, params = job.snapshot()
    print(f"version {version}: accuracy {task.evaluate(params, np)['accuracy']:.2f}")
