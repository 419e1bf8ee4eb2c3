"""The settings of a job as keywords, for editors and type checkers; `UncheckedConfig` has their defaults and help."""

from __future__ import annotations

from typing import Literal, TypedDict

from kvps.optim import Optimizer


class JobSettings(TypedDict, total=False):
    """The keywords of `Store.create_job`, `kvps.local` and `RunContext.create_job`; docs/settings.md explains each."""

    staleness: int
    workers: int
    shards: int
    optimizer: Optimizer | str
    local_steps: int
    fragments: int
    reduction: str
    staleness_scaling: Literal["none", "inverse", "inverse-sqrt"]
    gradient_format: str
    weight_format: str
    transport: Literal["auto", "redis", "shm"]
    nonfinite: Literal["reject", "skip"]
    missing: Literal["auto", "zeros", "skip"]
    quorum: int
    grace_ms: int
    late: Literal["next", "drop"]
    reject_norm: float | None
    worker_timeout_ms: int
    lease_ms: int
    durability: str
    min_workers: int
    units: int
    units_per_round: int
    units_per_epoch: int
    samples: int
    backup_after: float
    seed: int
    batch_size: int
    epochs: int
    procs: int
