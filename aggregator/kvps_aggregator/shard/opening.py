"""Opens a shard for its holder: the only module that knows both storages."""

from __future__ import annotations

from pathlib import Path

from kvps.device.base import CPU, Device
from kvps.job import Job
from kvps.transport.shm import ShmTransport
from kvps_aggregator.shard.shard import Shard
from kvps_aggregator.shard.storage import Storage
from kvps_aggregator.shard.storage_redis import RedisStorage
from kvps_aggregator.shard.storage_shm import ShmStorage
from kvps_aggregator.step.device_step import DeviceStep
from kvps_aggregator.step.shard_arrays import ShardArrays


def open_shard(
    job: Job, number: int, term: str, record: Path | None = None, device: Device = CPU, memory_lost: bool = False
) -> Shard:
    """Return a shard held under `term`, which must be loaded next.

    `record` is the directory that keeps contributions, `device` reduces them. `memory_lost` says that the job's shared
    memory is lost, even if this process cannot see that.
    """
    here = device is CPU
    arrays = ShardArrays(job.config, job.layout, number) if here else DeviceStep(job.config, job.layout, number, device)
    storage: Storage
    if isinstance(job.access.transport, ShmTransport):
        storage = ShmStorage(job, job.access.transport, term, arrays, record is None, memory_lost)
    else:
        storage = RedisStorage(job, number, term, arrays)
    return Shard(job, number, term, arrays, storage, record)
