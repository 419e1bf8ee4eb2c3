"""What is simulated, a job and the hosts that it runs on; and the constants that were measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Setting:
    """One simulated run of SGD. Sizes are in bytes, bandwidths in bits a second each way, times in seconds.

    nodes   data nodes (masters of a cluster), each with an aggregator
    size    of the model in float32
    local   whether all processes are on one host; else each worker, data node and aggregator has one of its own
    cores   of each host that a data node is on
    """

    workers: int = 8
    nodes: int = 1
    shards: int = 0
    size: float = 40e6
    bandwidth: float = 25e9
    latency_s: float = 50e-6
    cores: float = 16
    local: bool = False
    staleness: int = 0
    gradient_format: str = "fp32"
    weight_format: str = "fp32"
    compute_s: float = 0.1
    rounds: int = 20

    def __post_init__(self) -> None:
        """Let there be as many shards as nodes, unless the user says more."""
        object.__setattr__(self, "shards", max(self.shards, self.nodes))


class Constants:
    """What one step costs, in seconds of one core: the numbers of constants.json, which says what each is of, and when
    and where they were measured."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def __getattr__(self, name: str) -> Any:
        return self._values[name]

    @classmethod
    def load(cls) -> Constants:
        """Return the constants that were measured."""
        return cls(json.loads((Path(__file__).parent / "constants.json").read_text())["constants"])

    def on_machine(self, reference: float) -> Constants:
        """Return what the steps cost on a machine where the reference takes so many seconds."""
        factor = reference / self.reference

        def scaled(value: Any) -> Any:
            return {key: factor * each for key, each in value.items()} if isinstance(value, dict) else factor * value

        return Constants({name: scaled(value) for name, value in self._values.items()})
