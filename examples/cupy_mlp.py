"""A multilayer perceptron on the digits by hand, in CuPy; in NumPy where no GPU is named.

kvps run -w 2 -- python cupy_mlp.py 0      # both on the GPU of index 0
kvps run -w 2 -- python cupy_mlp.py        # on the CPU
"""

import sys

import numpy as np
from sklearn.datasets import load_digits

import kvps

ROUNDS, BATCH, HIDDEN = 200, 64, 128

device = kvps.open_device(int(sys.argv[1]) if len(sys.argv) > 1 else None)  # before anything touches CUDA
xp = device.xp

pixels, labels = load_digits(return_X_y=True)
order = np.random.default_rng(0).permutation(len(labels))
x, y = (xp.asarray(array) for array in ((pixels[order] / 16).astype(np.float32), labels[order]))
HELD_OUT = 360


def forward(params, x):
    """The hidden layer (n, HIDDEN), and probabilities (n, 10)."""
    hidden = xp.maximum(x @ params["W1"] + params["b1"], 0)
    scores = hidden @ params["W2"] + params["b2"]
    p = xp.exp(scores - scores.max(1, keepdims=True))
    return hidden, p / p.sum(1, keepdims=True)


def gradient(params, x, y):
    """Of the cross-entropy, on the device where it is computed."""
    hidden, p = forward(params, x)
    p[xp.arange(len(y)), y] -= 1
    p /= len(y)
    back = (p @ params["W2"].T) * (hidden > 0)
    return {"W1": x.T @ back, "b1": back.sum(0), "W2": hidden.T @ p, "b2": p.sum(0)}


def initial():
    rng = np.random.default_rng(0)
    return {
        "W1": rng.normal(0, 0.1, (64, HIDDEN)).astype(np.float32),
        "b1": np.zeros(HIDDEN, np.float32),
        "W2": rng.normal(0, 0.1, (HIDDEN, 10)).astype(np.float32),
        "b2": np.zeros(10, np.float32),
    }


with kvps.from_env() as worker:
    job = worker.create_job(initial(), optimizer=kvps.Adam(lr=0.003))
    with job.join(worker.id, device=device) as session:
        while session.clock < ROUNDS:  # a copy that is started again goes on with its own next batch
            params = session.pull()  # CuPy's arrays, on that device
            rows = np.random.default_rng((worker.rank, session.clock)).integers(HELD_OUT, len(y), BATCH)
            session.push(gradient(params, x[rows], y[rows]))  # CuPy's arrays as they are
    if worker.rank == 0:
        job.await_finished()
        params = {name: device.upload(array) for name, array in job.snapshot()[1].items()}
        right = forward(params, x[:HELD_OUT])[1].argmax(1) == y[:HELD_OUT]
        print(f"{device.name}: test accuracy {float(right.mean()):.4f}")
