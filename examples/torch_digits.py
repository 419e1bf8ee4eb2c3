"""A PyTorch model on scikit-learn's handwritten digits.

kvps run -w 3 -- python torch_digits.py                  # the weights of one worker, bit for bit
kvps run -w 3 --staleness 2 -- python torch_digits.py    # batches of the next two versions may begin before

Alone it runs too, as the one worker of its own. On several machines each runs `train` by itself: see docs/torch.md.
"""

import math

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import kvps
import kvps.torch

BATCH, BATCHES_PER_VERSION, EPOCHS = 32, 3, 14


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
        for images, labels in worker.batches(TensorDataset(x, y)):  # each counts once, whoever computes it or dies
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            worker.step(loss)


def accuracy(model: nn.Module) -> float:
    x, y = (array[-360:] for array in data())
    with torch.no_grad():
        return (model.eval()(x).argmax(1) == y).float().mean().item()


def main() -> None:
    model = make_model()
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    samples = len(data()[0]) - 360
    versions = EPOCHS * math.ceil(math.ceil(samples / BATCH) / BATCHES_PER_VERSION)
    optimizer = kvps.torch.optimizer(model, sgd, torch.optim.lr_scheduler.CosineAnnealingLR(sgd, versions))
    with kvps.from_env() as me:
        job = me.create_job(
            kvps.torch.parameters(model, buffers="average"),
            optimizer=optimizer,
            samples=samples,
            batch_size=BATCH,
            epochs=EPOCHS,
            units_per_round=BATCHES_PER_VERSION,
        )
        train(job, me.id, model)
        if me.rank == 0:
            job.await_finished()
            kvps.torch.load(job, model)  # the last weights, and BatchNorm's statistics
            print(f"{job.config.mode}: test accuracy {accuracy(model):.4f}")


if __name__ == "__main__":
    main()
