"""Images with noise and a CNN with dropout: training whose every part is random, for tests of the same bits."""

from __future__ import annotations

import random

import numpy as np
import torch
from kvps_workers import load_task
from torch import nn
from torch.utils.data import Dataset

SAMPLES = 1438


class NoisyDigits(Dataset[tuple[torch.Tensor, int]]):
    """The first digits, 8 x 8 pixels each, with noise from every source of random numbers that an augmentation uses."""

    def __init__(self, samples: int = SAMPLES) -> None:
        images, labels = load_task("digits").data(0, 1, np)
        self._images, self._labels = torch.tensor(images[:samples]).reshape(-1, 1, 8, 8), labels[:samples].tolist()

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        noise = torch.randn(1, 8, 8) + float(np.random.normal()) + random.random()
        return self._images[number] + 0.1 * noise, self._labels[number]


def cnn() -> nn.Sequential:
    """Return a CNN with dropout, always with the same weights."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Dropout(0.4), nn.Flatten(), nn.Linear(144, 10))
