"""No torn reads and no starving reader while versions fly by. Readers, writer and aggregator are processes."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.synchronize import Event
from typing import Any

import numpy as np
import pytest
from helpers.harness import aggregating

import kvps
from kvps.store import Store

READERS = 8
READS = 200

_spawn = multiprocessing.get_context("spawn")


def _write(url: str, done: Event, begun: Event) -> None:
    """Commit as fast as it goes: every version adds 1 to every weight."""
    with kvps.connect(url) as store:
        job = store.job("storm")
        grads = {p.name: -np.ones(p.shape, np.float32) for p in job.layout.parameters}
        with aggregating(job), job.join("w0") as session:
            while not done.is_set():
                session.pull()
                session.push(grads)
                if session.clock > 20:
                    begun.set()


def _read(url: str, begun: Event, results: Any) -> None:
    """Read again and again; every weight of a whole version equals its number."""
    os.nice(10)  # the writer comes first, or eight readers on two cores would calm the storm
    with kvps.connect(url) as store:
        job = store.job("storm")
        begun.wait()
        torn, versions = 0, set()
        for _ in range(READS):
            version, weights = job.snapshot()
            torn += any((value != version).any() for value in weights.values())
            versions.add(version)
        results.put((torn, len(versions), job.reader.reads, job.reader.restarts))


@pytest.mark.slow
@pytest.mark.parametrize(("size", "shards"), [(700_000, 2), (4, 1)])
def test_a_pull_during_a_storm_of_commits_is_one_version(store: Store, size: int, shards: int) -> None:
    """With 4 chunks on 2 shards; and with a tiny model, whose commits are as fast as they come."""
    start = {"a": np.zeros(size, np.float32), "b": np.zeros(3, np.float32)}
    store.create_job("storm", start, shards=shards, reduction="sum", optimizer=kvps.SGD(lr=1.0))
    done, begun, results = _spawn.Event(), _spawn.Event(), _spawn.Queue()
    writer = _spawn.Process(target=_write, args=(store.url, done, begun))
    readers = [_spawn.Process(target=_read, args=(store.url, begun, results)) for _ in range(READERS)]
    for process in [writer, *readers]:
        process.start()
    got = [results.get() for _ in readers]
    done.set()
    for process in [writer, *readers]:
        process.join()
        assert process.exitcode == 0
    reads, restarts = sum(g[2] for g in got), sum(g[3] for g in got)
    print(f"{store.job('storm').state().version} versions, {reads} reads, {restarts} restarts")
    assert [torn for torn, *_ in got] == [0] * READERS
    assert all(done == READS for _, _, done, _ in got), "no reader starves"
    assert max(seen for _, seen, *_ in got) > READS / 10, "there was a storm"
    assert restarts <= 0.05 * reads, f"{restarts} restarts of {reads} reads"
