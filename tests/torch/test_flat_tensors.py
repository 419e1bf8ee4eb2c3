"""Small tensors of a model that are copied together, wherever they are."""

from __future__ import annotations

import numpy as np
import torch

from kvps.arrays.layout import Layout
from kvps.torch.flat_tensors import FlatTensors


def test_a_device_without_page_locked_memory() -> None:
    """As a Mac's. The device meta stands for it: it is not the CPU, and memory cannot be page-locked for it."""
    layout = Layout.of({f"{number:02}": np.zeros(3, np.float32) for number in range(20)})
    tensors = {name: torch.empty(3, device="meta") for name in layout.numbers}
    FlatTensors(tensors, layout).fill(tensors, np.ones(layout.size, np.float32))
