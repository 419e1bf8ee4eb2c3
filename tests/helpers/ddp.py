"""DistributedDataParallel over gloo, which tests compare kvps.torch with; each rank is its own process.

python ddp.py RANK WORKERS FOLDER      rank 0 leaves FOLDER/<optimizer>.npz, the final weights, and its buffers in
                                       FOLDER/<optimizer>-buffers.npz; experts-<optimizer>.npz are of a model of which a
                                       rank does not use all, each round
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROUNDS = 20
Make = Callable[[Iterable[Any]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01),
}
OF_EXPERTS: dict[str, Make] = {
    "sgd": OPTIMIZERS["sgd"],
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1),
}


def net(hidden: int = 32) -> torch.nn.Sequential:
    """Return the same network in each call. No bias before the BatchNorm: its gradient is nothing but rounding."""
    torch.manual_seed(7)
    return torch.nn.Sequential(
        torch.nn.Linear(20, hidden, bias=False),
        torch.nn.BatchNorm1d(hidden),
        torch.nn.Tanh(),
        torch.nn.Linear(hidden, 5),
    )


class Experts(torch.nn.Module):
    """A layer that each rank uses, and experts of which it uses one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.trunk = torch.nn.Linear(20, 8)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(8, 5) for _ in range(3))

    def forward(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        out: torch.Tensor = self.experts[expert](torch.tanh(self.trunk(x)))
        return out


def expert_of(rank: int, round_: int) -> int:
    """Return the expert that a rank uses: in some rounds both the same, so that one or two are used by none."""
    return rank if round_ % 3 else (round_ // 3) % 3


def loss_of_expert(model: torch.nn.Module, rank: int, round_: int) -> torch.Tensor:
    x, y = batch(rank, round_)
    return torch.nn.functional.cross_entropy(model(x, expert_of(rank, round_)), y)


def batch(rank: int, round_: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x (16, 20) and y (16,) of one worker's round."""
    rng = np.random.default_rng((rank, round_))
    x = torch.from_numpy(rng.normal(size=(16, 20)).astype(np.float32))
    return x, x[:, :5].argmax(1)


def loss_of(model: torch.nn.Module, rank: int, round_: int) -> torch.Tensor:
    x, y = batch(rank, round_)
    return torch.nn.functional.cross_entropy(model(x), y)


def train_on(worker: Any, model: torch.nn.Module, number: int, weight: int | None = None) -> int:
    """Do what a loop does with the worker's batch of this number; return what `step` returns."""
    worker.pull()
    loss = loss_of(model, worker.session.rank, number)
    loss.backward()
    clock: int = worker.step(loss, weight)
    return clock


def weights_of(model: torch.nn.Module) -> dict[str, np.ndarray]:
    return {name: parameter.detach().numpy().copy() for name, parameter in model.named_parameters()}


def as_rank(rank: int, workers: int, folder: Path, train: Callable[[], Mapping[str, Mapping[str, Any]]]) -> None:
    """Train as a rank of a group over gloo. Rank 0 leaves the arrays that `train` returns, by the names of files."""
    torch.distributed.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=workers)
    left = train()
    if rank == 0:
        for name, arrays in left.items():
            np.savez(folder / f"{name}.npz", **arrays)
    torch.distributed.destroy_process_group()


def train_all(rank: int) -> dict[str, dict[str, Any]]:
    """Train each model with each optimizer."""
    left: dict[str, dict[str, Any]] = {}

    def train(name: str, model: torch.nn.Module, make: Callable[..., Any], loss_in: Callable[..., Any]) -> None:
        together = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=isinstance(model, Experts))
        optimizer = make(model.parameters())
        for round_ in range(ROUNDS):
            optimizer.zero_grad()
            loss_in(together, rank, round_).backward()
            optimizer.step()
        left[name] = weights_of(model)
        left[f"{name}-buffers"] = {buffer: values.numpy() for buffer, values in model.named_buffers()}

    for name, make in OPTIMIZERS.items():
        train(name, net(), make, loss_of)
    for name, make in OF_EXPERTS.items():
        train(f"experts-{name}", Experts(), make, loss_of_expert)
    return left


if __name__ == "__main__":
    as_rank(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), lambda: train_all(int(sys.argv[1])))
