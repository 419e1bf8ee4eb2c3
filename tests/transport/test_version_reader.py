"""No torn reads and no starving reader while versions fly by. Readers, writer and aggregator are processes."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from multiprocessing.synchronize import Event
from typing import Any

import numpy as np
import pytest
from helpers.harness import aggregating, commit_steadily
from kvps_aggregator.shard import mirror

import kvps
from kvps.arrays.layout import MOST_ITEMS
from kvps.store import Store
from kvps.transport import version_reader

READERS = 4
READS = 100

pytestmark = pytest.mark.usefixtures("forked")

_spawn = multiprocessing.get_context("spawn")


def _read(url: str, begun: Event, results: Any) -> None:
    """Read again and again; every weight of a whole version equals its number."""
    os.nice(10)  # the writer comes first, or the readers would calm the storm
    with kvps.connect(url) as store:
        job = store.job("job")
        begun.wait()
        torn, versions, flat = 0, set(), np.empty(job.layout.size, np.float32)
        for _ in range(READS):
            version = job.access.reader.fetch(
                job.access.reader.round_state(), flat
            ).version  # not `snapshot`, which spares the writer
            torn += bool((flat != version).any())
            versions.add(version)
        results.put((torn, len(versions), job.access.reader.reads, job.access.reader.restarts))


@pytest.mark.slow
@pytest.mark.parametrize(("size", "shards"), [(700_000, 2), (4, 1)])
def test_a_pull_during_a_storm_of_commits_is_one_version(store: Store, size: int, shards: int) -> None:
    """With 4 chunks on 2 shards; and with a tiny model, whose commits are as fast as they come."""
    start = {"a": np.zeros(size, np.float32), "b": np.zeros(3, np.float32)}
    store.create_job("job", start, shards=shards, reduction="sum", optimizer=kvps.SGD(lr=1.0))
    done, begun, results = _spawn.Event(), _spawn.Event(), _spawn.Queue()
    writer = _spawn.Process(target=commit_steadily, args=(store.url, done, begun))
    readers = [_spawn.Process(target=_read, args=(store.url, begun, results)) for _ in range(READERS)]
    for process in [writer, *readers]:
        process.start()
    got = [results.get() for _ in readers]
    done.set()
    for process in [writer, *readers]:
        process.join()
        assert process.exitcode == 0
    reads, restarts = sum(g[2] for g in got), sum(g[3] for g in got)
    print(f"{store.job('job').state().version} versions, {reads} reads, {restarts} restarts")
    assert [torn for torn, *_ in got] == [0] * READERS
    assert all(done == READS for _, _, done, _ in got), "no reader starves"
    assert max(seen for _, seen, *_ in got) > READS / 10, "there was a storm"
    assert restarts <= 0.05 * reads, f"{restarts} restarts of {reads} reads"


# -- what a layout claims ------------------------------------------------------------------------------------------

_WITH_2_GIB = "import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30)); "
_CALLS = """
import numpy as np
import kvps
from kvps_aggregator import serve
for call in (
    lambda job: job.snapshot(),
    lambda job: job.join("w0").pull(),
    lambda job: serve(job),
    lambda job: job.checkpoint(),
):
    try:
        with kvps.connect(sys.argv[1]) as store:
            call(store.job("job"))
    except kvps.CorruptData as error:
        print(error)
"""


def _claim(store: Store, **settings: Any) -> None:
    """A job of eight bytes whose layout claims 32 GiB."""
    job = store.create_job("job", {"x": np.ones(2, np.float32)}, **settings)
    layout = json.loads(job.layout.to_json())
    layout["parameters"][0]["shape"] = [MOST_ITEMS]
    store.client.call("SET", job.access.keys.layout, json.dumps(layout))


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["redis", "shm"])
def test_no_layout_has_a_process_allocate_what_redis_has_not(store: Store, transport: str) -> None:
    """In a process that gets 2 GiB."""
    _claim(store, transport=transport)
    done = subprocess.run([sys.executable, "-c", _WITH_2_GIB + _CALLS, store.url], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    refusal = "Redis does not have the 34,359,738,368 bytes of weights that the layout of job 'job' says"
    assert done.stdout.count(refusal) == 4
    store.remove_job("job")
    assert not list(store.client.scan("kvps:{*"))


@pytest.mark.parametrize("transport", ["redis", "shm"])
def test_a_large_job_is_opened_while_versions_fly_by(
    store: Store, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    """A commit may free what is being looked for; that is not what another program wrote."""
    monkeypatch.setattr(version_reader, "_CHECKED_BYTES", 0)
    monkeypatch.setattr(mirror, "EVERY_S", 0.0)
    job = store.create_job("job", {"x": np.ones(600_000, np.float32)}, transport=transport)
    with aggregating(job), job.join("w0") as session:
        for _ in range(40):
            session.pull()
            session.push({"x": np.ones(600_000, np.float32)})
            store.job("job")
    store.client.unlink(list(store.client.scan(f"{job.access.keys.slot(0)}w:*")))
    with pytest.raises(kvps.CorruptData, match="Redis does not have the"):
        store.job("job")
