"""Hand a job to free hosts (`kvps worker --queue`, and a `kvps aggregator start`), and wait for its weights."""

import sys

import numpy as np
from kvps_workers import load_task
from kvps_workers.queue.queue import CPU, TaskQueue

import kvps

task = load_task("digits")
settings = {"workers": 2, "batch_size": task.batch_size, "epochs": 10, "optimizer": kvps.SGD(lr=task.lr)}

with kvps.connect() as store, TaskQueue(store.url, CPU) as queue:  # or connect("redis://host:6379")
    job = store.create_job(store.free_name("from-python"), task.parameters(seed=0), task="digits", **settings)
    queue.submit(job)
    try:
        print(f"submitted {job.name}; hosts at the queue: {queue.hosts()}")
        print("it needs hosts (kvps worker --queue) and an aggregator (kvps aggregator start)")
        finished = job.await_finished()
    except KeyboardInterrupt:
        queue.cancel(job.name)
        sys.exit(f"interrupted: {job.name} is cancelled")
    if not finished:
        sys.exit(f"no worker is at {job.name}, which has rounds undone: it stays, see kvps status {job.name}")
    version, params = job.snapshot()
    print(f"version {version}: accuracy {task.evaluate(params, np)['accuracy']:.2f}")
