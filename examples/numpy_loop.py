"""The smallest whole loop: fit a line with three workers, all in this process.  python examples/numpy_loop.py"""

import numpy as np

import kvps

x = np.linspace(-1, 1, 300, dtype=np.float32)
y = 3 * x + 2


def gradient(params, rank, round_):
    """Loss and gradient on the rank-th third of the samples."""
    mine = slice(rank, None, 3)
    error = params["a"] * x[mine] + params["b"] - y[mine]
    grads = {"a": 2 * (error * x[mine]).mean(keepdims=True), "b": 2 * error.mean(keepdims=True)}
    return float((error**2).mean()), grads


start = {"a": np.zeros(1, np.float32), "b": np.zeros(1, np.float32)}
with kvps.local(start, workers=3, optimizer=kvps.SGD(lr=0.2)) as job:
    weights = job.train(gradient, rounds=100)
    print(f"version {job.state().version}: y = {weights['a'][0]:.3f} x + {weights['b'][0]:.3f}")
