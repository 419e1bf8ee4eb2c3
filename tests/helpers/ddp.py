"""DistributedDataParallel over gloo, which tests compare kvps.torch with; each rank is its own process.

python ddp.py RANK WORKERS FOLDER      rank 0 leaves FOLDER/<optimizer>.npz, the final weights, and its buffers in
                                       FOLDER/<optimizer>-buffers.npz
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROUNDS = 20
OPTIMIZERS: dict[str, Callable[[Iterable[Any]], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01),
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


def batch(rank: int, round_: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x (16, 20) and y (16,) of one worker's round."""
    rng = np.random.default_rng((rank, round_))
    x = torch.from_numpy(rng.normal(size=(16, 20)).astype(np.float32))
    return x, x[:, :5].argmax(1)


def loss_of(model: torch.nn.Module, rank: int, round_: int) -> torch.Tensor:
    x, y = batch(rank, round_)
    return torch.nn.functional.cross_entropy(model(x), y)


def weights_of(model: torch.nn.Module) -> dict[str, np.ndarray]:
    return {name: parameter.detach().numpy().copy() for name, parameter in model.named_parameters()}


def main(rank: int, workers: int, folder: Path) -> None:
    torch.distributed.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=workers)
    for name, make in OPTIMIZERS.items():
        model = net()
        together = torch.nn.parallel.DistributedDataParallel(model)
        optimizer = make(model.parameters())
        for round_ in range(ROUNDS):
            optimizer.zero_grad()
            loss_of(together, rank, round_).backward()
            optimizer.step()
        if rank == 0:
            np.savez(folder / f"{name}.npz", **weights_of(model))
            np.savez(folder / f"{name}-buffers.npz", **{name: b.numpy() for name, b in model.named_buffers()})
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
