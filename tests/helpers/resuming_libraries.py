"""A tiny model that Trainer trains, and resumes from its own checkpoints, as two copies.

It saves a checkpoint after step SAVED. Before its step WAITS each copy leaves a file, `waits-<rank>`, and
waits for the file `go`.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, StepLR
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

import kvps.torch

STEPS, SAVED, WAITS, BATCH = 12, 4, 6, 2


class Rows(Dataset[dict[str, torch.Tensor]]):
    """A worker's own rows."""

    def __init__(self, rank: int, steps: int) -> None:
        self._x = torch.randn(steps * BATCH, 4, generator=torch.Generator().manual_seed(rank))

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return {"x": self._x[number], "labels": self._x[number].sum()}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.mse_loss(self.layer(x)[:, 0], labels)}


def make_optimizer(model: nn.Module) -> tuple[kvps.torch.Optimizer, LRScheduler]:
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = StepLR(sgd, 3, 0.5)
    return kvps.torch.Optimizer(sgd, model, schedule), schedule


def wait(optimizer: kvps.torch.Optimizer) -> None:
    """Wait for the file, if this is the step. Called before each."""
    if optimizer.steps == WAITS:
        Path(f"waits-{optimizer.rank}").touch()
        while not Path("go").exists():
            time.sleep(0.01)


def by_trainer() -> None:
    class Wait(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            wait(optimizer)

    model = Net()
    optimizer, schedule = make_optimizer(model)
    with optimizer:
        folder = Path(f"trainer-{optimizer.rank}")
        settings = {"max_steps": STEPS, "per_device_train_batch_size": BATCH, "save_steps": SAVED}
        settings |= {"train_sampling_strategy": "sequential", "report_to": "none", "disable_tqdm": True}
        arguments = TrainingArguments(str(folder), use_cpu=True, **settings)
        rows = Rows(optimizer.rank, STEPS)
        trainer = Trainer(model, arguments, train_dataset=rows, optimizers=(optimizer, schedule), callbacks=[Wait()])
        trainer.train(resume_from_checkpoint=any(folder.glob("checkpoint-*")))


if __name__ == "__main__":
    by_trainer()
