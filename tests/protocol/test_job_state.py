"""What a job's keys hold becomes a state of the job, or CorruptData that names the field."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from helpers.internals import fall_silent

from kvps.errors import CorruptData
from kvps.store import Store

TWO = {"x": np.ones(2, np.float32)}


def test_a_version_that_lacks_a_shard_is_corrupt(store: Store, raw: Any) -> None:
    """The layout says how many there are: an aggregator that looked for the name of a missing one raised IndexError."""
    job = store.create_job("a", TWO, shards=2)
    raw.hdel(job.access.keys.version, "shard:1")
    for look in (job.state, job.access.reader.round_state, job.snapshot):
        with pytest.raises(CorruptData, match="the version: shard:1 is missing"):
            look()


@pytest.mark.parametrize("version", ["", "x", "-1", "9" * 20])
def test_a_version_that_is_no_number_is_corrupt(store: Store, version: str) -> None:
    """The scripts answer with nothing where it should be, and an aggregator raised ValueError."""
    job = store.create_job("a", TWO)
    store.client.call("HSET", job.access.keys.version, "version", version)
    with pytest.raises(CorruptData, match="version"):
        job.access.scripts.plan()
    with pytest.raises(CorruptData, match="version"):
        job.access.scripts.recover(store.client.run_id(), "00000000", 0)


@pytest.mark.parametrize("run", ["resume", "pause 3", "stop", "suspend x", "stop -1"])
def test_what_control_has_noted_may_be_damaged(store: Store, run: str) -> None:
    """A pause has no last round, and all else has one."""
    job = store.create_job("a", TWO)
    store.client.call("HSET", job.access.keys.version, "run", run)
    with pytest.raises(CorruptData, match=r"run is|the last round"):
        job.state()


CHANGES = [{"pid": None}, {"host": None}, {"start": None}, {"incarnation": None}, {"pid": "x"}, {"host": "\x1b"}]


@pytest.mark.parametrize("change", CHANGES)
def test_the_entry_of_a_living_worker_may_be_damaged(store: Store, change: dict[str, Any]) -> None:
    """A join under its id names its process, or says what is wrong; it raised KeyError."""
    job = store.create_job("a", TWO)
    session = job.join("w0")
    entry = json.loads(store.client.call("HGET", job.access.keys.workers, "w0")) | change
    damaged = json.dumps({name: value for name, value in entry.items() if value is not None})
    store.client.call("HSET", job.access.keys.workers, "w0", damaged)
    if "start" in change:
        assert job.join("w0").incarnation != session.incarnation, "its process is not the one that runs"
    else:
        with pytest.raises(CorruptData, match=f"worker 'w0': {next(iter(change))} "):
            job.join("w0")
    fall_silent(session)
