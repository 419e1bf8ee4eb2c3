"""When a job goes over shared memory, and that its memory ends with it."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.commands import kvps_run
from helpers.harness import aggregating, gradient, model
from helpers.internals import segments_of
from helpers.shared_memory import LARGE, OVER_SHM, commit_all, committed, segment_names, segments_folder
from helpers.waiting import eventually
from kvps_aggregator import Aggregator

import kvps
from kvps.store import Store
from kvps.transport import shared_memory


def test_auto_is_shared_memory_where_that_is_sure_and_worth_it(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A line says what lacks, as in a container, whose /dev/shm has 64 MB unless it is told otherwise."""

    def chosen(params: Any = LARGE, **settings: Any) -> str:
        job = store.create_job("job", params, **settings)
        store.remove_job("job")
        return job.config.transport

    assert chosen() == "shm"
    assert chosen(model()) == "redis"
    assert not caplog.messages
    assert chosen(shards=2) == "redis"
    assert chosen(weight_format="bf16") == "redis"
    assert chosen(transport="redis") == "redis"
    assert chosen(model(), transport="shm") == "shm"
    monkeypatch.setattr(store.client, "port", lambda: 6379)
    assert chosen() == "redis", "others may come over TCP"
    monkeypatch.undo()
    monkeypatch.setattr(shared_memory, "free_bytes", lambda: 20_000_000)
    caplog.clear()
    assert chosen() == "redis"
    (warning,) = caplog.messages
    assert "job job: arrays go through Redis, and not through memory, which is faster: /dev/shm has 20.0 MB" in warning
    assert "--shm-size" in warning
    assert chosen(model()) == "redis"
    assert caplog.messages == [warning], "nothing is said of a small model"
    with pytest.raises(kvps.ServerFull, match=r"has 20\.0 MB left, and the job needs .* MB"):
        chosen({"x": np.zeros(3_000_000, np.float32)}, transport="shm")
    monkeypatch.setattr(shared_memory, "ROOT", Path("/nowhere"))
    assert chosen() == "redis"
    assert "/nowhere is not there" in caplog.messages[-1]
    with pytest.raises(kvps.InvalidSetting, match=r"^/nowhere is not there"):
        chosen(transport="shm")


def test_a_removed_job_leaves_no_memory(store: Store) -> None:
    job = store.create_job("job", LARGE, **OVER_SHM)
    with aggregating(job):
        with job.join("w0") as session:
            session.pull()
            session.push(LARGE)
            assert committed(job, 1)
        store.remove_job("job")
    assert segments_of(job)
    assert not segments_of(job).folder.exists()


def test_segments_of_the_dead_are_swept_and_those_of_the_living_are_not(store: Store) -> None:
    job = store.create_job("job", model(), workers=2, staleness=2, **OVER_SHM)
    assert segments_of(job)
    aggregator = Aggregator(job, threading.Event())
    aggregator.hold()
    dead, alive = job.join("w0"), job.join("w1")
    for session in (dead, alive):
        session.push(gradient(session.pull(), session.rank, 0))
    alive.pull()
    alive.buffers()
    segments_of(job).make(f"g:w0.{dead.incarnation}:2", 64)  # never accepted
    segments_of(job).make("w:1.old-1-abcdabcd", 64)  # staged by a holder that was replaced
    again = job.join("w0", takeover=True)
    aggregator.sweep()
    left = {f"g:w0.{dead.incarnation}:1", f"g:w1.{alive.incarnation}:1", f"g:w1.{alive.incarnation}:2"}
    assert {name for name in segment_names(job) if not name.startswith("opt")} == left
    commit_all(aggregator)
    aggregator.sweep()
    assert f"g:w0.{dead.incarnation}:1" not in segment_names(job)
    assert job.state().clock == {"w0": 1, "w1": 1}
    for session in (again, alive):
        session.leave()
    aggregator.release()


@pytest.mark.slow
@pytest.mark.parametrize("lasting", [False, True])
def test_what_a_server_that_keeps_nothing_had_in_memory_ends_with_it(home: Path, lasting: bool) -> None:
    code = (
        "import sys, numpy, kvps; s = kvps.connect(); "
        "j = s.create_job('job', {'x': numpy.zeros(400_000, 'f4')}); print(s.url, j.config.transport, flush=True); "
        "sys.stdin.read()"
    )
    if lasting:
        kvps_run("server", "start")
    user = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert user.stdout
    url, transport = user.stdout.readline().split()
    assert transport == "shm"
    assert list(segments_folder(url).iterdir())
    user.kill()
    user.communicate()
    if lasting:
        assert segments_folder(url).exists()
        kvps_run("server", "stop", "--yes")
    assert eventually(lambda: not segments_folder(url).exists())
