"""Hand a job to free hosts (`kvps worker --queue`, and a `kvps aggregator start`), and wait for its weights."""

import numpy as np
from kvps_workers import load_task
from kvps_workers.queue import CPU, TrainingQueue

import kvps

task = load_task("digits")
settings = {"workers": 2, "batch_size": task.batch_size, "epochs": 10, "optimizer": kvps.SGD(lr=task.lr)}

with kvps.connect() as store, TrainingQueue(store.url, CPU) as queue:  # or connect("redis://host:6379")
    job = store.create_job("from-python", task.parameters(seed=0), task="digits", **settings)
    queue.submit(job)
    print(f"submitted; {queue.hosts()} hosts serve the queue")
    while not (state := job.state()).finished(job.config):
        store.client.wait({job.keys.commits: state.bell})  # a commit, a join or a leave rings
    version, params = job.snapshot()
    print(f"version {version}: accuracy {task.evaluate(params, np)['accuracy']:.2f}")
