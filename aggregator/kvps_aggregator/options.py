"""What a user chooses about an aggregator: the options of `kvps aggregator start`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvps.device.base import CPU, Device
from kvps_aggregator.checkpoints import Checkpoints
from kvps_aggregator.nearness import Near


@dataclass(frozen=True)
class AggregatorOptions:
    """The options of an aggregator, or of all aggregators of a `JobWatcher`.

    record       the directory that keeps every contribution in a file
    checkpoints  where checkpoints are written, and how often; None writes none
    device       reduces and steps; every device gives the same bits
    memory_lost  the user's word that the job's present shared memory is lost
    near         the nodes of a cluster whose shards are taken before others
    """

    record: Path | None = None
    checkpoints: Checkpoints | None = None
    device: Device = CPU
    memory_lost: bool = False
    near: Near | None = None
