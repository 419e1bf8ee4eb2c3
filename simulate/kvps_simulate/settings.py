"""What is simulated: a job, the hosts that it runs on, and what may go wrong; and the constants that were measured."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from kvps.arrays.formats import Format, format_of
from kvps.errors import InvalidSetting, counted
from kvps.parsing import Fields
from kvps.staleness import ASP, mode_name

TOPOLOGIES = {
    "apart": "each data node and each aggregator has a host of its own",
    "beside": "data node i and aggregator i are on the host of worker i",
    "one-host": "all data nodes and aggregators are on one host, and each worker on another",
    "local": "all processes are on one host",
}
SLOTS = {"sgd": 0, "momentum": 1, "adagrad": 1, "adam": 2}
"""Optimizer -> arrays of state, each as large as the weights."""


@dataclass(frozen=True)
class Setting:
    """One simulated run. Sizes are in bytes, bandwidths in bits a second each way, times in seconds.

    size           of the model in float32
    jitter         the sigma of a log-normal factor on each computation
    slow, slow_by  which part of all computations takes so many times as long
    worker_failures, node_failures   of one worker or data node in an hour
    restart_s      from a worker's death until it has joined again; detect_s until it is evicted
    failover_s     for which a data node that failed cannot be reached
    """

    workers: int = 8
    nodes: int = 1
    aggregators: int = 0
    shards: int = 0
    size: float = 40e6
    bandwidth: float = 25e9
    latency_s: float = 50e-6
    cores: float = 16
    topology: str = "apart"
    staleness: int = 0
    gradient_format: str = "fp32"
    weight_format: str = "fp32"
    optimizer: str = "sgd"
    compute_s: float = 0.1
    jitter: float = 0.0
    slow: float = 0.0
    slow_by: float = 5.0
    worker_failures: float = 0.0
    node_failures: float = 0.0
    restart_s: float = 30.0
    detect_s: float = 10.0
    failover_s: float = 15.0
    rounds: int = 20
    seed: int = 0

    def __post_init__(self) -> None:
        if self.aggregators == 0:
            object.__setattr__(self, "aggregators", self.nodes)
        if self.shards == 0:
            object.__setattr__(self, "shards", max(self.nodes, self.aggregators))
        for name, (low, high) in _BOUNDS.items():
            value = getattr(self, name)
            if not (math.isfinite(value) and low <= value <= high):
                raise InvalidSetting(f"{_option(name)} must be from {low:g} to {high:g}, not {value:g}")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise InvalidSetting(
                    f"{_option(name)} must be one of {', '.join(choices)}, not {getattr(self, name)!r}"
                )
        if self.shards < max(self.nodes, self.aggregators):
            holders = f"{counted(self.nodes, 'node')} and {counted(self.aggregators, 'aggregator')}"
            least = max(self.nodes, self.aggregators)
            raise InvalidSetting(
                f"--shards {self.shards} leaves some of {holders} without a shard: give at least {least}"
            )
        if self.topology == "beside" and self.nodes > self.workers:
            nodes = counted(self.nodes, "data node")
            raise InvalidSetting(f"--topology beside: {counted(self.workers, 'worker')} cannot be hosts of {nodes}")
        format_of(self.gradient_format)

    @property
    def mode(self) -> str:
        """BSP, SSP(N) or ASP."""
        return mode_name(self.staleness)

    @property
    def max_pending(self) -> int:
        """How many accepted contributions of one worker may wait, as the job's setting is by default."""
        return 2 if self.staleness == ASP else self.staleness + 1

    @property
    def gradient(self) -> Format:
        return format_of(self.gradient_format)

    def to_dict(self) -> dict[str, float | int | str]:
        return asdict(self)


_BOUNDS: Mapping[str, tuple[float, float]] = {
    "workers": (1, 100_000),
    "nodes": (1, 10_000),
    "aggregators": (1, 10_000),
    "shards": (1, 100_000),
    "size": (4, 1e15),
    "bandwidth": (1e3, 1e14),
    "latency_s": (0, 10),
    "cores": (0.1, 4096),
    "staleness": (-1, 1_000_000),
    "compute_s": (0, 1e6),
    "jitter": (0, 3),
    "slow": (0, 1),
    "slow_by": (1, 1e6),
    "worker_failures": (0, 1e4),
    "node_failures": (0, 1e4),
    "restart_s": (0, 1e6),
    "detect_s": (0, 1e6),
    "failover_s": (0, 1e6),
    "rounds": (1, 1_000_000),
    "seed": (0, 2**32 - 1),
}


_CHOICES: Mapping[str, tuple[str, ...]] = {
    "topology": tuple(TOPOLOGIES),
    "optimizer": tuple(SLOTS),
    "weight_format": ("fp32", "bf16"),
}


def _option(name: str) -> str:
    return "--" + name.removesuffix("_s").replace("_", "-")


@dataclass(frozen=True)
class Constants:
    """What one step costs, in seconds of one core, as `python -m kvps_bench.calibrate` measures it.

    reference                        of all processes, for the round that tells how fast the machine was
    put_byte, get_byte, put_key, get_key, free_key    of Redis, for bytes and for each key of a chunk;
                                     free_key with what a contribution's chunk costs more to an aggregator that reads it
    stage_shard                      of Redis, for each shard of a version, besides its bytes and `ready`
    push, turn, plan, ready          of Redis, for one call of a script with its request
    push_digest, plan_contribution, plan_digest, commit_contribution, commit_digest, ready_shard
                                     of Redis, for each digest of a push, each contribution or digest in a plan and in a
                                     commit, and for each shard in a call of `ready`
    inbox_contribution, inbox_digest of Redis, to list what waits; parse_contribution, parse_digest: of the aggregator
    worker_push, worker_pull         of a worker, whatever the size
    send_byte, receive_byte          of a client
    shard, shard_contribution, aggregate   of an aggregator, for each shard, each contribution in it, and each version
    encode, reduce                   of the worker and of the aggregator, for an item, by format
    decode                           of the worker, for an item, by format of weights
    step                             of the aggregator, for an item, by optimizer
    """

    reference: float
    put_byte: float
    get_byte: float
    put_key: float
    get_key: float
    free_key: float
    stage_shard: float
    push: float
    turn: float
    plan: float
    ready: float
    push_digest: float
    plan_contribution: float
    plan_digest: float
    commit_contribution: float
    commit_digest: float
    ready_shard: float
    inbox_contribution: float
    inbox_digest: float
    parse_contribution: float
    parse_digest: float
    worker_push: float
    worker_pull: float
    send_byte: float
    receive_byte: float
    shard: float
    shard_contribution: float
    aggregate: float
    encode: Mapping[str, float]
    reduce: Mapping[str, float]
    decode: Mapping[str, float]
    step: Mapping[str, float]

    @classmethod
    def load(cls, path: Path | None = None) -> Constants:
        """Return the constants in a file, or those that came with kvps. Raises InvalidSetting."""
        source = path or Path(__file__).parent / "constants.json"
        try:
            read = Fields.of_json(source.read_text(), str(source)).fields("constants")
            tables = {"encode", "reduce", "decode", "step"}
            values: dict[str, Any] = {
                f.name: _table(read, f.name) if f.name in tables else read.number(f.name) for f in fields(cls)
            }
        except OSError as error:
            raise InvalidSetting(f"--constants {source}: {error.strerror}") from None
        except (UnicodeDecodeError, ValueError) as error:
            raise InvalidSetting(f"--constants {source}: {error}") from None
        return cls(**values)

    def on_machine(self, reference: float) -> Constants:
        """Return what the steps cost on a machine where the reference takes so many seconds."""
        factor = reference / self.reference

        def scaled(value: Any) -> Any:
            return {key: factor * each for key, each in value.items()} if isinstance(value, dict) else factor * value

        return Constants(**{name: scaled(value) for name, value in asdict(self).items()})

    def of_format(self, table: Mapping[str, float], name: str) -> float:
        """Return the seconds of an item in a format; those of topk are the same for every part."""
        return table[name.partition(":")[0]]

    def to_json(self, about: Mapping[str, object]) -> str:
        """Return the text of a file of constants, with what is known about the measurement."""
        return json.dumps({"about": about, "constants": asdict(self)}, indent=1) + "\n"


def _table(read: Fields, name: str) -> dict[str, float]:
    entries = read.fields(name)
    return {str(key): entries.number(key) for key in entries.as_dict()}
