"""A run that rq-dashboard shows: many trainings as jobs of an RQ queue, each of about a second."""

from __future__ import annotations

import sys
import time

from watched import Regression

STEPS, STEP_S = 20, 0.05


def train(seed, lr):
    """Train once; return the last loss."""
    samples, weights = Regression(seed), Regression.start()
    for _ in range(STEPS):
        loss, gradient = samples.loss_and_gradient(weights)
        weights -= lr * gradient
        time.sleep(STEP_S)
    return loss


if __name__ == "__main__":
    import watched_queue
    from redis import Redis
    from rq import Queue

    name, url = sys.argv[1:]
    queue = Queue(name, connection=Redis.from_url(url))
    for seed in range(300):
        queue.enqueue(watched_queue.train, seed, lr=0.05, description=f"{name}: training {seed}")
