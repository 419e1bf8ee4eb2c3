"""Softmax regression on the digits, by hand.  kvps run -w 3 -- python examples/train_under_run.py

Alone it runs too, as the one worker of its own: python examples/train_under_run.py
"""

import numpy as np
from sklearn.datasets import load_digits

import kvps

ROUNDS, BATCH = 300, 32

pixels, labels = load_digits(return_X_y=True)
order = np.random.default_rng(0).permutation(len(labels))
x, y = (pixels[order] / 16).astype(np.float32), labels[order]
test, train = slice(0, 360), slice(360, None)


def softmax(z):
    """Rows of z (n, 10) as probabilities."""
    e = np.exp(z - z.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def gradient(params, rows):
    """Cross-entropy of some samples, and its gradient."""
    p = softmax(x[rows] @ params["W"] + params["b"])
    each = np.arange(len(rows))
    loss = -float(np.log(p[each, y[rows]] + 1e-12).mean())
    p[each, y[rows]] -= 1
    p /= len(rows)
    return loss, {"W": x[rows].T @ p, "b": p.sum(0)}


with kvps.from_env() as worker:
    start = {"W": np.zeros((64, 10), np.float32), "b": np.zeros(10, np.float32)}
    optimizer = worker.settings.get("optimizer", kvps.SGD(lr=0.5))  # kvps run --lr may say otherwise
    job = worker.create_job(start, optimizer=optimizer)
    mine = np.arange(len(y))[train][worker.rank :: worker.workers]
    with job.join(worker.id) as session:
        while session.clock < ROUNDS:  # a copy that is started again goes on with its own next batch
            rows = np.random.default_rng((worker.rank, session.clock)).choice(mine, BATCH, replace=False)
            loss, grads = gradient(session.pull(), rows)
            session.push(grads, loss)
    if worker.rank == 0:
        job.await_finished()  # the others may have a round to do
        version, weights = job.snapshot()
        right = softmax(x[test] @ weights["W"] + weights["b"]).argmax(1) == y[test]
        print(f"version {version}, test accuracy {right.mean():.4f}")
