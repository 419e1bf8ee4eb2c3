"""What SystemDS's paramserv has options for, as loops over a session: freq, scheme, modelAvg and weighting.

python examples/paramserv.py
"""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

import kvps

WORKERS, EPOCHS, BATCH, LR = 3, 20, 16, 0.2

x = np.linspace(-1, 1, 500, dtype=np.float32)
y = 3 * x + 2
START = {"a": np.zeros(1, np.float32), "b": np.zeros(1, np.float32)}


def gradient(params, rows):
    """The gradient of the mean squared error on these samples."""
    error = params["a"] * x[rows] + params["b"] - y[rows]
    return {"a": 2 * (error * x[rows]).mean(keepdims=True), "b": 2 * error.mean(keepdims=True)}


def batches_of(session, epoch, scheme="random"):
    """The samples of each batch that this worker has in an epoch."""
    rows = kvps.partition(len(x), session.config.workers, session.rank, scheme=scheme, epoch=epoch)
    return [rows[first : first + BATCH] for first in range(0, len(rows), BATCH)]


def scheme(session, scheme):
    """DISJOINT_CONTIGUOUS, DISJOINT_ROUND_ROBIN, DISJOINT_RANDOM, OVERLAP_RESHUFFLE: which samples a worker has."""
    for epoch in range(EPOCHS):
        for rows in batches_of(session, epoch, scheme):
            session.push(gradient(session.pull(), rows))


def freq(session, every):
    """BATCH is every=1, NBATCHES every=N; EPOCH, all batches of an epoch, is every=None. A push has their mean."""
    for epoch in range(EPOCHS):
        batches = batches_of(session, epoch)
        for first in range(0, len(batches), every or len(batches)):
            rows = np.concatenate(batches[first:][:every])
            session.push(gradient(session.pull(), rows))


def model_avg(session, every, weighting=False):
    """Step on batch after batch, and push how far that came: SGD with lr=1 makes the mean of all workers' models. With
    weighting, each counts as often as it has seen samples."""
    for epoch in range(EPOCHS):
        batches = batches_of(session, epoch)
        for first in range(0, len(batches), every):
            pulled = session.pull()
            model = dict(pulled)
            for rows in batches[first:][:every]:
                grads = gradient(model, rows)
                model = {name: model[name] - np.float32(LR) * grads[name] for name in model}
            samples = sum(map(len, batches[first:][:every]))
            session.push({name: pulled[name] - model[name] for name in model}, weight=samples if weighting else None)


def train(loop, **settings):
    """Run a loop in each worker, and return the last version of the weights."""
    settings = {"workers": WORKERS, "optimizer": kvps.SGD(lr=LR)} | settings
    with kvps.local(START, **settings) as job:

        def work(worker):
            with job.join(worker) as session:
                loop(session)

        with ThreadPoolExecutor(WORKERS) as threads:
            list(threads.map(work, [f"w{rank}" for rank in range(WORKERS)]))
        job.await_finished()
        return job.snapshot()[1]


AVERAGE = kvps.SGD(lr=1.0)
EACH = {
    "scheme contiguous, BSP": (partial(scheme, scheme="contiguous"), {}),
    "scheme overlap, ASP": (partial(scheme, scheme="overlap"), {"staleness": -1}),
    "freq NBATCHES": (partial(freq, every=4), {}),
    "freq EPOCH, SSP": (partial(freq, every=None), {"staleness": 1}),
    "modelAvg": (partial(model_avg, every=4), {"optimizer": AVERAGE}),
    "modelAvg, weighting": (
        partial(model_avg, every=4, weighting=True),
        {"optimizer": AVERAGE, "reduction": "weighted"},
    ),
}

if __name__ == "__main__":
    for name, (loop, settings) in EACH.items():
        weights = train(loop, **settings)
        print(f"{name}: y = {weights['a'][0]:.2f} x + {weights['b'][0]:.2f}")
