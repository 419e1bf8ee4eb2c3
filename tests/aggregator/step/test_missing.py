"""A parameter that no contribution of a version has a gradient for: no step of it, whatever the rule."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.arrays import assert_same_bits
from helpers.optimizers import OPTIMIZERS
from helpers.stepping import stepped

from kvps.optim import Optimizer

SIZES = {"a": 5, "b": 7, "c": 3}
VERSIONS = 6


def any_params(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=size).astype(np.float32) for name, size in SIZES.items()}


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
def test_each_parameter_steps_as_if_only_its_own_gradients_were(optimizer: Optimizer) -> None:
    """`b` has every second gradient, `c` those from the third on. State and count of steps are each one's own."""
    has = {"a": range(VERSIONS), "b": range(0, VERSIONS, 2), "c": range(2, VERSIONS)}
    start = any_params(99)
    gradients = [{name: g for name, g in any_params(v).items() if v in has[name]} for v in range(VERSIONS)]
    together = stepped(optimizer, start, gradients, shards=2)
    for name in SIZES:
        alone = stepped(optimizer, {name: start[name]}, [{name: g[name]} for g in gradients if name in g])
        assert_same_bits({name: together[name]}, alone)
