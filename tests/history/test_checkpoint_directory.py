"""A directory of checkpoints: which is the newest of a job, whatever else is there."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from helpers.checkpoints import PATIENT, saved, train_to
from helpers.harness import model

import kvps
from kvps.history.checkpoint import Checkpoint
from kvps.history.checkpoint_directory import newest
from kvps.store import Store


def test_the_newest_is_that_of_the_job_that_wrote_last(store: Store, tmp_path: Path) -> None:
    """Not the highest version: somebody may have begun anew under the same name."""
    job = store.create_job("job", model(), **PATIENT)
    train_to(job, 3, 1)
    old = saved(job, tmp_path)
    store.remove_job("job")
    job = store.create_job("job", model(), **PATIENT)
    paths = [saved(job, tmp_path)]
    train_to(job, 2, 1)
    paths.append(saved(job, tmp_path))
    for path in (old, *paths):
        os.utime(path, ns=(10**9, 10**9) if path == old else (2 * 10**9, 2 * 10**9))  # of one second
    saved(store.create_job("job.2", model()), tmp_path)
    (tmp_path / f".{paths[1].name}.12ab").write_bytes(b"being written")
    (tmp_path / "job.safetensors").write_bytes(b"the user's own")

    found = newest(tmp_path, "job")
    assert (found.path, found.checkpoint.version, found.damaged) == (paths[1], 2, [])
    os.truncate(paths[1], 100)
    found = newest(tmp_path, "job")
    assert (found.path, found.damaged) == (paths[0], [paths[1].name])
    os.truncate(paths[0], 100)
    found = newest(tmp_path, "job")
    assert (found.path, found.damaged) == (old, [paths[1].name, paths[0].name])
    os.truncate(old, 100)
    with pytest.raises(kvps.CorruptData, match=r"every checkpoint of job 'job' in .* is damaged or cut short"):
        newest(tmp_path, "job")
    assert newest(tmp_path, "another") is None


def test_a_checkpoint_says_whether_all_work_was_done(store: Store, tmp_path: Path) -> None:
    static = store.create_job("static", {"x": np.zeros(4, np.float32)}, workers=2)
    for worker, last in (("w0", False), ("w1", True)):
        with static.join(worker):
            pass
        assert static.checkpoint().finished == last
    units = store.create_job("units", {"x": np.zeros(4, np.float32)}, units=2)
    with units.join():
        assert not units.checkpoint().finished
    units.access.client.call("HSET", units.access.keys.units, "next", 2, "done", 2)
    assert units.checkpoint().finished
    early = store.create_job("early", {"x": np.zeros(4, np.float32)}, units=2)
    early.stop("the loss is low enough")
    path = saved(early, tmp_path)
    assert Checkpoint.load(path).finished
    again = store.restore_job(Checkpoint.load(path), "again")
    assert again.state().finished(again.config), "a stop stays a stop"
    again.resume()
    assert not again.checkpoint().finished
