"""No torn reads and no starving reader while versions fly by."""

from __future__ import annotations

import threading

import numpy as np
from harness import aggregating

import kvps
from kvps.store import Store

READERS = 8
READS = 150


def test_a_pull_during_a_storm_of_commits_is_one_version(store: Store) -> None:
    """Every commit adds 1 to every weight, over two shards: all weights of a whole version equal its number."""
    job = store.create_job(
        "storm",
        {"a": np.zeros(700_000, np.float32), "b": np.zeros(3, np.float32)},  # 3 chunks, on 2 shards
        shards=2,
        staleness=-1,
        reduction="sum",
        optimizer=kvps.SGD(lr=1.0),
    )
    _storm(store, job, reads=READS)


def test_no_reader_of_a_tiny_model_starves(store: Store) -> None:
    """Commits of a tiny model are as fast as they come."""
    job = store.create_job("tiny", {"a": np.zeros(4, np.float32)}, reduction="sum", optimizer=kvps.SGD(lr=1.0))
    _storm(store, job, reads=READS)


def _storm(store: Store, job: kvps.Job, reads: int) -> None:
    done = threading.Event()
    torn: list[str] = []
    versions: list[int] = []

    def write() -> None:
        grads = {p.name: -np.ones(p.shape, np.float32) for p in job.layout.parameters}
        with job.join("w0") as session:
            while not done.is_set():
                session.pull()
                session.push(grads)

    def read() -> None:
        for _ in range(reads):
            version, weights = job.snapshot()
            if any((value != version).any() for value in weights.values()):
                torn.append(f"version {version} held {[np.unique(value)[:3] for value in weights.values()]}")
            versions.append(version)

    with aggregating(job):
        writer = threading.Thread(target=write)
        writer.start()
        readers = [threading.Thread(target=read) for _ in range(READERS)]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        done.set()
        writer.join()
    assert torn == []
    assert len(versions) == READERS * reads, "every reader got all its reads"
    assert len(set(versions)) > 10, "there was a storm"
    assert job.reader.restarts <= 0.05 * job.reader.reads, f"{job.reader.restarts} restarts of {job.reader.reads}"
    print(f"{len(set(versions))} versions seen, {job.reader.restarts} restarts of {job.reader.reads} reads")
