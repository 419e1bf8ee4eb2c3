"""An optimizer and a reduction of your own. Start kvps in this directory:

kvps up digits --optimizer own_rules:Momentum:lr=0.1,mu=0.8 --reduction own_rules:median
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Momentum:
    """Heavy-ball momentum, as `kvps.SGD(momentum=mu)` computes it: ``b = mu*b + g``; ``p = p - lr*b``."""

    mu: float = 0.9
    slots = ("momentum",)

    def step(
        self,
        weights: Any,
        gradient: Any,
        state: Mapping[str, Any],
        out: Any,
        state_out: Mapping[str, Any],
        lr: float,
        version: int,
        xp: Any,
    ) -> None:
        buffer = state_out["momentum"]
        xp.multiply(state["momentum"], np.float32(self.mu), out=buffer)
        xp.add(buffer, gradient, out=buffer)
        xp.multiply(buffer, np.float32(lr), out=out)
        xp.subtract(weights, out, out=out)


def median(contributions: list[Any], weights: Sequence[int], out: Any, xp: Any) -> None:
    """The median of each item, as the reduction `median` computes it: sorted by minima and maxima."""
    count = len(contributions)
    for phase in range(count):
        for low in range(phase % 2, count - 1, 2):
            xp.minimum(contributions[low], contributions[low + 1], out=out)
            xp.maximum(contributions[low], contributions[low + 1], out=contributions[low + 1])
            xp.copyto(contributions[low], out)
    xp.copyto(out, contributions[count // 2])
    if count % 2 == 0:
        xp.add(contributions[count // 2 - 1], out, out=out)
        xp.divide(out, np.float32(2), out=out)
