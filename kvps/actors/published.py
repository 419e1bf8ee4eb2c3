"""Finds or makes the job that a learner publishes."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from kvps.actors.publisher import Holder
from kvps.arrays.dtypes import dtype_of
from kvps.arrays.given import Given
from kvps.arrays.inputs import state_of
from kvps.arrays.layout import DTYPE, Array, Layout
from kvps.arrays.state_dict import pack
from kvps.config import JobConfig, Metadata
from kvps.config.rollouts import Rollouts
from kvps.errors import JobExists, JobNotFound, KvpsError, LayoutMismatch, UsageError, install, some_of
from kvps.job import Job


class Asked(NamedTuple):
    """What a learner asks of a job that is not there yet: see `Store.publisher`."""

    dtype: str | None
    shards: int
    durability: str
    rollouts: Rollouts | None


class Jobs(Protocol):
    """The jobs of a server: `kvps.store.Store`."""

    def job(self, name: str) -> Job:
        """Return the job of that name. Raises JobNotFound."""

    def create_published(self, name: str, layout: Layout, flat: Array, config: JobConfig) -> Job:
        """Create a job that a learner publishes, with `flat` as version 0. Raises JobExists."""


def published_job(store: Jobs, name: str, model: Any, asked: Asked) -> tuple[Job, dict[str, str], Given]:
    """Return the job of that name, made if it is not there, the dtypes of the model's arrays, and where its
    next version comes. Raises LayoutMismatch if it has another model, UsageError if workers train it.
    """
    state = state_of(model)
    layout = Layout.of_state(state, asked.shards, asked.dtype)
    dtypes = {name: dtype_of(array, name).name for name, array in state.items()}
    given = Given(np.zeros(layout.size, DTYPE))
    try:
        job = store.job(name)
    except JobNotFound:
        config = JobConfig(
            staleness=-1,
            shards=asked.shards,
            durability=asked.durability,
            transport="redis",
            metadata=Metadata(publishes=1, rollouts=(asked.rollouts or Rollouts()).text),
        )
        pack(layout, state, given.flat)
        try:
            return store.create_published(name, layout, given.flat, config), dtypes, given
        except JobExists:  # another process has just made it
            job = store.job(name)
    if not job.config.metadata.publishes:
        raise UsageError(f"job {name!r} is trained by its workers: no learner publishes it, choose another name")
    _check_same(job, layout)
    _check_rollouts(job, asked.rollouts)
    return job, dtypes, given


def _check_same(job: Job, layout: Layout) -> None:
    """Raise LayoutMismatch unless a job has the arrays of a layout."""
    has, asked = ({p.name: (p.shape, p.dtype) for p in each.parameters} for each in (job.layout, layout))
    differ = [name for name in {**has, **asked} if has.get(name) != asked.get(name)]
    if differ or job.layout.tied != layout.tied or list(has) != list(asked):
        what = some_of(differ) if differ else "which names are tied, or their order"
        raise LayoutMismatch(
            f"job {job.name!r} has another model than this one (they differ in {what}): publish under another name, or "
            f"remove the job with kvps rm {job.name}"
        )


def _check_rollouts(job: Job, asked: Rollouts | None) -> None:
    """Raise UsageError unless experience comes to a job as it is asked for."""
    if asked is None:
        return
    has = job.config.metadata.rollouts
    differ = Rollouts.of(has).differing(asked) if has else ["rollouts"]
    if differ:
        raise UsageError(
            f"job {job.name!r} was made with other rollouts than these (they differ in {some_of(differ)}): leave "
            f"rollouts out to go on with its own, publish under another name, or remove the job with kvps rm {job.name}"
        )


def holder_of(job: Job, given: Given, checkpoints: Path | None, every: int) -> Holder:
    """Return what holds a job for its learner. By its name: the library imports no package above it. Raises KvpsError
    if that is not installed."""
    try:
        holder: Holder = import_module("kvps_aggregator").Publishing(job, given, checkpoints, every)
    except ModuleNotFoundError as error:
        raise KvpsError(
            f"Store.publisher needs the aggregator, and {error.name} is not installed: {install()} brings it"
        ) from None
    return holder
