"""What commands share that make a job: they show how far its parameters are made and stored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from kvps_workers import Task

from kvps.arrays.layout import CHUNK_BYTES
from kvps.config import JobConfig
from kvps.errors import KvpsError
from kvps.job import Job
from kvps.parsing import bytes_text
from kvps.store import Store
from kvps_cli.long_work import LongWork


def parameters_of(task: Task, config: JobConfig, quiet: bool) -> Mapping[str, Any]:
    """Return the parameters with which a task begins. Raises TaskFailed."""
    with LongWork(quiet) as work, work.stage(f"making the parameters of {config.metadata.task}"):
        return task.parameters(config.seed)


def create_job(store: Store, name: str, params: Mapping[str, Any], config: JobConfig, quiet: bool) -> Job:
    """Create a job. Raises what `Store.create_job` raises."""
    with storing(store, sum(np.asarray(array).nbytes for array in params.values()), quiet):
        return store.create_job(name, params, config=config)


@contextmanager
def storing(store: Store, nbytes: int, quiet: bool) -> Iterator[None]:
    """Show the storing of a job's first version, by the keys that the server has more than before: one for each chunk.

    What others store meanwhile counts too, so this is an estimate.
    """
    chunks = -(-nbytes // CHUNK_BYTES)

    def keys() -> int:
        return sum(store.client.on_masters(lambda node: int(node.call("DBSIZE"))))

    what = f"storing {bytes_text(nbytes)}"
    with LongWork(quiet) as work:
        try:
            before = keys()
        except KvpsError:  # a user with few rights may not ask
            stage = work.stage(what)
        else:
            stage = work.stage(what, chunks, "chunks", lambda: min(chunks, keys() - before))
        with stage:
            yield
