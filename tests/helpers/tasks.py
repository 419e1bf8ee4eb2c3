"""A task without a mistake, of which tests change something."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


class Good:
    """Its gradient pulls three weights to 1."""

    batch_size, epochs, lr = 4, 2, 0.5

    def parameters(self, seed: int) -> Mapping[str, Any]:
        return {"x": np.zeros(3, np.float32)}

    def data(self, rank: int, workers: int, xp: Any) -> Any:
        return (np.ones((6, 2), np.float32),)

    def gradient(self, params: Mapping[str, Any], batch: Any, xp: Any) -> Any:
        return 0.0, {"x": params["x"] - 1}

    def evaluate(self, params: Mapping[str, Any], xp: Any) -> Any:
        return {"loss": 0.25}
