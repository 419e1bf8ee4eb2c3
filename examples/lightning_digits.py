"""The digits with Lightning, which has the loop. Three lines are kvps's.

kvps run -w 2 -- python lightning_digits.py              # Lightning calls the optimizer
kvps run -w 2 -- python lightning_digits.py manual       # this file calls it

Alone it runs too.
"""

import sys
from typing import Any

import lightning
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import kvps.torch

BATCH, EPOCHS = 32, 2


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)


def make_data() -> TensorDataset:
    pixels, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    return TensorDataset(pixels[:1536].float() / 16, labels[:1536])


class Digits(lightning.LightningModule):
    def __init__(self, manual: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
        self.automatic_optimization = not manual

    def loss_of(self, batch: list[torch.Tensor]) -> torch.Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self.layers(images), labels)

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        loss = self.loss_of(batch)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def configure_optimizers(self) -> Any:
        return kvps.torch.Optimizer(make_optimizer(self), self)

    def train_dataloader(self) -> Any:
        data, optimizer = make_data(), self.optimizers()
        return DataLoader(Subset(data, range(optimizer.rank, len(data), optimizer.workers)), BATCH)


def main(manual: bool) -> None:
    model = Digits(manual)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(max_epochs=EPOCHS, accelerator="cpu", **quiet)
    trainer.fit(model)
    optimizer = trainer.optimizers[0]
    if optimizer.rank == 0:
        with torch.no_grad():
            print(f"loss {model.loss_of(make_data()[:]).item():.3f}, version {optimizer.job.state().version}")


if __name__ == "__main__":
    main("manual" in sys.argv)
