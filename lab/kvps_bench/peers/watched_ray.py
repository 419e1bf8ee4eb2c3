"""A run that Ray's dashboard shows: an actor with the weights, and workers that never wait for each other.

It follows Ray's own asynchronous example. Worker 1 is three times as slow as worker 0. It trains until it is ended.
"""

from __future__ import annotations

import os
import sys
import time

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
import ray
from watched import Regression

NAME, PORT, FOLDER = sys.argv[1], int(sys.argv[2]), sys.argv[3]
STEP_S = (0.1, 0.3)
LR = 0.05


@ray.remote(num_cpus=1)
class Server:
    """The actor that holds the weights."""

    def __init__(self):
        self.weights = Regression.start()

    def apply(self, gradient):
        self.weights = self.weights - LR * gradient
        return self.weights


@ray.remote(num_cpus=1)
class Worker:
    """An actor that computes gradients."""

    def __init__(self, rank):
        self.rank, self.samples = rank, Regression(rank)

    def gradient(self, weights):
        loss, gradient = self.samples.loss_and_gradient(weights)
        time.sleep(STEP_S[self.rank])
        return loss, gradient


if __name__ == "__main__":
    ray.init(num_cpus=3, dashboard_port=PORT, object_store_memory=100 << 20, _temp_dir=FOLDER)
    server = Server.options(name=f"{NAME}-server").remote()
    workers = [Worker.options(name=f"{NAME}-w{rank}").remote(rank) for rank in range(len(STEP_S))]
    weights = Regression.start()
    under_way = {worker.gradient.remote(weights): worker for worker in workers}
    steps = 0
    while True:
        (done,), _ = ray.wait(list(under_way))
        worker = under_way.pop(done)
        loss, gradient = ray.get(done)
        weights = ray.get(server.apply.remote(gradient))
        under_way[worker.gradient.remote(weights)] = worker
        steps += 1
        if steps % 50 == 0:
            print(f"step {steps}, loss {loss:.3f}", flush=True)
