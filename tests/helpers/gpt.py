"""The GPT and the recipe of examples/gpt.py, trained by PyTorch alone: what tests compare kvps with.

python gpt.py RANK WORKERS FOLDER STEPS      one rank of DistributedDataParallel over gloo; rank 0 leaves FOLDER/ddp.npz
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from helpers.ddp import as_rank, weights_of
from helpers.pages import example_of
from helpers.torch_process import ends_of_ddp

Weights = dict[str, np.ndarray]
WORKERS, CLIP_NORM = 2, 1.0


example = example_of("gpt")


def plain_loop(
    steps: int,
    dtype: torch.dtype = torch.float32,
    *,
    reverse: bool = False,
    fused: bool = False,
    clip_norm: float = CLIP_NORM,
    make_optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer] = example.make_optimizer,
    scheduled: int = 0,
) -> Weights:
    """Return the float32 weights after a loop that averages the workers' gradients itself.

    A model of `dtype` computes with them, rounded. `reverse` gives it the samples of a batch in the other order, and
    `fused` takes PyTorch's other AdamW, which rounds once where the first one rounds twice: both are as right. The
    schedule is for `steps`, or for `scheduled`.
    """
    masters, model = example.make_model().to(dtype).float(), example.make_model().to(dtype)
    optimizer = make_optimizer(masters)
    for group in optimizer.param_groups:
        group["fused"] = fused
    scheduler = example.make_scheduler(optimizer, scheduled or steps)
    text = example.make_text()
    for round_ in range(steps):
        with torch.no_grad():
            for parameter, master in zip(model.parameters(), masters.parameters(), strict=True):
                parameter.copy_(master)
        gradients = []
        for rank in range(WORKERS):
            model.zero_grad()
            batch = example.batch_of(text, rank, round_)
            example.loss_of(model, *(part.flip(0) if reverse else part for part in batch)).backward()
            gradients.append([p.grad.float() for p in model.parameters()])
        for master, *each in zip(masters.parameters(), *gradients, strict=True):
            master.grad = sum(each) / WORKERS
        torch.nn.utils.clip_grad_norm_(masters.parameters(), clip_norm)
        optimizer.step()
        scheduler.step()
    return weights_of(masters)


def by_ddp(folder: Path, steps: int) -> Weights:
    """Return the weights with which DistributedDataParallel ends, on a process for each worker."""
    return ends_of_ddp(folder, str(steps), program="gpt.py")["ddp"]


def distance(one: Weights, other: Weights) -> float:
    """Return the Euclidean distance of two runs' weights, over how far the second has come from its first weights."""
    start = weights_of(example.make_model())
    assert one.keys() == other.keys() == start.keys()

    def norm(left: Weights, right: Weights) -> float:
        return math.sqrt(sum(float(np.sum((left[n].astype(np.float64) - right[n]) ** 2)) for n in start))

    return norm(one, other) / norm(other, start)


def _train(rank: int, steps: int) -> dict[str, Weights]:
    model, text = example.make_model(), example.make_text()
    together = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = example.make_optimizer(model)
    scheduler = example.make_scheduler(optimizer, steps)
    for round_ in range(steps):
        optimizer.zero_grad()
        example.loss_of(together, *example.batch_of(text, rank, round_)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        scheduler.step()
    return {"ddp": weights_of(model)}


if __name__ == "__main__":
    rank, workers, folder, steps = sys.argv[1:]
    as_rank(int(rank), int(workers), Path(folder), lambda: _train(int(rank), int(steps)))
