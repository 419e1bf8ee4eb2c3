"""Ray's parameter server: an actor with the weights, actors that compute, arrays in the object store (shared memory).

It follows Ray's own synchronous example, but sums in place: the example's np.stack copies all gradients once more.
"""

from __future__ import annotations

import os

from lockstep import LR, THREADS, answer, options, right, sizes, timed

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
import numpy as np
import ray


@ray.remote(num_cpus=1)
class Server:
    """The actor that holds the weights."""

    def __init__(self, items):
        self.weights = [np.zeros(size, np.float32) for size in items]

    def current(self):
        return self.weights

    def apply(self, *grads):
        for weight, mine in zip(self.weights, zip(*grads)):
            total = mine[0] + mine[1] if len(mine) > 1 else mine[0].copy()
            for grad in mine[2:]:
                total += grad
            total *= np.float32(LR / len(mine))
            weight -= total
        return self.weights


@ray.remote(num_cpus=1)
class Worker:
    """An actor that copies the weights into its own arrays and returns its gradient."""

    def __init__(self, rank, items):
        self.grads = [np.full(size, rank + 1, np.float32) for size in items]
        self.weights = [np.zeros(size, np.float32) for size in items]

    def take(self, weights):
        for mine, new in zip(self.weights, weights):
            np.copyto(mine, new)
        return self.grads

    def look(self, weights):
        self.take(weights)
        return [float(w[i]) for w in self.weights for i in (0, -1)]


if __name__ == "__main__":
    asked = options()
    ray.init(
        num_cpus=asked["workers"] + 1,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
        object_store_memory=max(256 << 20, 12 * asked["nbytes"] * (asked["workers"] + 1)),
        runtime_env={"env_vars": dict.fromkeys(THREADS, "1")},
    )
    items = sizes(asked["nbytes"], asked["tensors"])
    server = Server.remote(items)
    workers = [Worker.remote(rank, items) for rank in range(asked["workers"])]
    state = {"weights": server.current.remote(), "rounds": 0}
    ray.wait([state["weights"]])

    def step():
        grads = [worker.take.remote(state["weights"]) for worker in workers]
        state["weights"] = server.apply.remote(*grads)
        ray.wait([state["weights"]])
        state["rounds"] += 1

    def check():
        looks = ray.get([worker.look.remote(state["weights"]) for worker in workers])
        return all(right(values, asked["workers"], state["rounds"]) for values in looks)

    answer(lambda number: timed(number, step), check)
    ray.shutdown()
