"""Steps of an optimizer as an aggregator makes them, shard by shard and chunk by chunk, without a server."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from kvps_aggregator.step.device_step import DeviceStep
from kvps_aggregator.step.shard_arrays import ShardArrays

from kvps.arrays.layout import Layout
from kvps.arrays.number_ranges import ranges_of
from kvps.config import JobConfig
from kvps.device.base import Device
from kvps.optim import Optimizer
from kvps.protocol.plan import Contribution, Plan

Params = dict[str, np.ndarray]


def flat(params: Params) -> np.ndarray:
    return np.concatenate([array.reshape(-1) for array in params.values()])


def stepped(
    optimizer: Optimizer, params: Params, gradients: Iterable[Params], shards: int = 1, device: Device | None = None
) -> Params:
    """Return the weights after a step on each of the gradients, on the device if there is one. A gradient may lack
    parameters."""
    layout, config = Layout.of(params, shards), JobConfig(optimizer=optimizer, shards=shards)
    parts: list[ShardArrays] = [
        DeviceStep(config, layout, n, device) if device else ShardArrays(config, layout, n) for n in range(shards)
    ]
    for part in parts:
        np.copyto(part.weights, flat(params)[part.low : part.high])
        part.loaded()
    for version, gradient in enumerate(gradients, 1):
        lacks = ranges_of(number for number, name in enumerate(params) if name not in gradient)
        sent = flat({name: gradient.get(name, np.zeros_like(array)) for name, array in params.items()})
        one = (Contribution("w0", "1-0", version, version, version - 1, 1, "", None, "", lacks),)
        plan = Plan(version, version, "", "", 1, version - 1, one, ())
        for part in parts:
            for chunk in part.chunks:
                part.step(plan, chunk, [sent[chunk.start : chunk.stop]])
            part.promote()
    return layout.cut(np.concatenate([part.weights for part in parts]))
