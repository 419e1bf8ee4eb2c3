"""A PyTorch model on scikit-learn's handwritten digits.

kvps run -w 3 -- python torch_digits.py                  # BSP: every worker waits for every other
kvps run -w 3 --staleness 2 -- python torch_digits.py    # SSP: two rounds of slack; -1 is ASP

Alone it runs too, as the one worker of its own. On several machines each runs `train` by itself: see docs/torch.md.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

import kvps
import kvps.torch

ROUNDS, BATCH = 200, 32


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """Pixels (1797, 64) and labels (1797,), in an order of their own; the last 360 are held out."""
    x, y = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(20))
    return x[order].float() / 16, y[order]


def train(job: kvps.Job, worker_id: str, model: nn.Module) -> None:
    x, y = (array[:-360] for array in data())
    with kvps.torch.join(job, model, worker_id) as worker:
        while worker.session.clock < ROUNDS:  # a copy that is started again goes on with its own next batch
            worker.pull()
            rng = torch.Generator().manual_seed(1000 * worker.session.clock + worker.session.rank)
            rows = torch.randint(len(x), (BATCH,), generator=rng)
            loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
            loss.backward()
            worker.step(loss)


def accuracy(model: nn.Module) -> float:
    x, y = (array[-360:] for array in data())
    with torch.no_grad():
        return (model.eval()(x).argmax(1) == y).float().mean().item()


def main() -> None:
    model = make_model()
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = kvps.torch.optimizer(model, sgd, torch.optim.lr_scheduler.CosineAnnealingLR(sgd, ROUNDS))
    with kvps.from_env() as me:
        job = me.create_job(kvps.torch.parameters(model), optimizer=optimizer)
        train(job, me.id, model)
        if me.rank == 0:
            job.await_finished()  # the others may have a round to do
            kvps.torch.load(job, model)  # the last weights; the BatchNorm statistics are this worker's own
            print(f"{job.config.mode}: test accuracy {accuracy(model):.4f}")


if __name__ == "__main__":
    main()
