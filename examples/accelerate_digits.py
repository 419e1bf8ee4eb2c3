"""The digits with Hugging Face's accelerate, which accumulates gradients. Three lines are kvps's.

kvps run -w 2 -- python accelerate_digits.py

Alone it runs too.
"""

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import kvps.torch

BATCH, ACCUMULATED, EPOCHS = 16, 2, 2


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def make_data() -> TensorDataset:
    pixels, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    return TensorDataset(pixels[:1536].float() / 16, labels[:1536])


def main() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATED)
    model, data = make_model(), make_data()
    with kvps.torch.Optimizer(make_optimizer(model), model, clip_norm=1.0) as shared:
        loader = DataLoader(Subset(data, range(shared.rank, len(data), shared.workers)), BATCH)
        model, optimizer, loader = accelerator.prepare(model, shared, loader)
        for _ in range(EPOCHS):
            for images, labels in loader:
                with accelerator.accumulate(model):
                    loss = nn.functional.cross_entropy(model(images), labels)
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
        if shared.rank == 0:
            print(f"loss {loss.item():.3f}, version {shared.job.state().version}")


if __name__ == "__main__":
    main()
