"""Three workers train a PyTorch model on scikit-learn's handwritten digits.

python torch_digits.py               # BSP: every worker waits for every other
python torch_digits.py 2             # SSP: two rounds of slack; -1 is ASP

Here the workers are threads of one process. On several machines each runs `train` by itself: see docs/torch.md.
"""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import kvps_aggregator
import torch
from sklearn.datasets import load_digits
from torch import nn

import kvps
import kvps.torch

WORKERS, ROUNDS, BATCH = 3, 200, 32


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """Pixels (1797, 64) and labels (1797,), in an order of their own; the last 360 are held out."""
    x, y = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(20))
    return x[order].float() / 16, y[order]


def train(job: kvps.Job, worker_id: str, model: nn.Module) -> nn.Module:
    x, y = (array[:-360] for array in data())
    with kvps.torch.join(job, model, worker_id) as worker:
        while worker.session.round < ROUNDS:
            worker.pull()
            rng = torch.Generator().manual_seed(worker.session.round * WORKERS + worker.session.rank)
            rows = torch.randint(len(x), (BATCH,), generator=rng)
            loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
            loss.backward()
            worker.step(loss)
    return model


def main(staleness: int) -> None:
    model = make_model()
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = kvps.torch.optimizer(model, sgd, torch.optim.lr_scheduler.CosineAnnealingLR(sgd, ROUNDS))
    stop = threading.Event()
    with kvps.connect() as store, ThreadPoolExecutor() as pool:
        job = store.create_job(
            "torch-digits", kvps.torch.parameters(model), optimizer=optimizer, staleness=staleness, workers=WORKERS
        )
        aggregator = pool.submit(kvps_aggregator.serve, job, stop=stop)
        try:
            workers = [pool.submit(train, job, f"w{rank}", make_model()) for rank in range(WORKERS)]
            model, *_ = [worker.result() for worker in workers]
            aggregator.result()  # until all is committed
            kvps.torch.load(job, model)  # the last weights; the BatchNorm statistics are those of w0
        finally:
            stop.set()

    x, y = (array[-360:] for array in data())
    with torch.no_grad():
        right = model.eval()(x).argmax(1) == y
    print(f"{job.config.mode}: test accuracy {right.float().mean():.4f}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
