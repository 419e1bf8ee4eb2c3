"""Checkpoints of a job that a learner publishes: each array has its own dtype, and the job goes on from any of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from helpers.checkpoints import saved
from helpers.harness import check_chain, log_entries
from kvps_cli.prove.verify import proof_of
from safetensors import safe_open

import kvps
from kvps.history.checkpoint import Checkpoint
from kvps.history.checkpoint_directory import newest
from kvps.history.commit_log import keep
from kvps.history.log_stream import LogStream
from kvps.job import Job
from kvps.store import Store

pytestmark = pytest.mark.contract

Arrays = dict[str, np.ndarray]


def _model(version: int) -> Arrays:
    rng = np.random.default_rng(version)
    tied = rng.normal(size=(4, 33)).astype(ml_dtypes.bfloat16)
    return {
        "embed": tied,
        "h": rng.normal(size=(3, 5)).astype(np.float16),
        "eight": rng.normal(size=7).astype(ml_dtypes.float8_e4m3fn),
        "f": rng.normal(size=()).astype(np.float32),
        "steps": np.array([version, -1], np.int64),
        "mask": rng.random(5) < 0.5,
        "none": np.zeros((0, 4), np.float16),
        "head": tied,
    }


def _same(one: Any, other: Arrays) -> bool:
    return list(one) == list(other) and all(
        one[name].dtype == array.dtype and one[name].tobytes() == array.tobytes() for name, array in other.items()
    )


def _saved_with_log(job: Job, directory: Path) -> Checkpoint:
    """Save a job as `kvps checkpoint save` does."""
    keep(LogStream(job.access), directory, job.state(), job.state().version)
    return Checkpoint.load(saved(job, directory))


def test_the_file_has_each_array_in_its_own_dtype(store: Store, tmp_path: Path) -> None:
    with store.publisher("policy", _model(0), shards=2) as policy:
        policy.publish(_model(1))
        path = saved(policy.job, tmp_path)
    model = _model(1)
    with safe_open(path, "numpy") as file:
        assert sorted(file.keys()) == sorted(name for name in model if name != "head"), "a tied array is there once"
        dtypes = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
        assert file.get_tensor("steps").tolist() == [1, -1]
    assert dtypes == {
        "embed": "BF16", "h": "F16", "eight": "F8_E4M3", "f": "F32", "steps": "I64", "mask": "BOOL", "none": "F16",
    }  # fmt: skip


@pytest.mark.parametrize(("before", "after"), [(1, None), (1, 3), (3, 1), (2, 5)])
def test_a_restored_job_goes_on_with_its_learner(store: Store, tmp_path: Path, before: int, after: int | None) -> None:
    with store.publisher("policy", _model(0), shards=before) as policy:
        for version in range(1, 4):
            policy.publish(_model(version), loss=version / 7)
        found = _saved_with_log(policy.job, tmp_path)
        first = policy.job.id
        policy.close()
    store.remove_job("policy")
    job = store.restore_job(found, shards=after)
    assert (job.layout.shards, job.config.transport, job.config.mode) == (after or before, "redis", "published")
    watch = store.watch("policy")
    assert watch.update() == 3
    assert _same(watch.arrays, _model(3))
    with store.publisher("policy", _model(9)) as policy:
        assert (policy.version, policy.job.id != first) == (3, True)
        model = _model(9)
        assert policy.load(model) == 3
        assert _same(model, _model(3))
        for version in (4, 5):
            assert policy.publish(_model(version)) == version
            assert watch.update() == version
            assert _same(watch.arrays, _model(version))
        assert watch.traffic.repairs == 0
        assert check_chain(policy.job, tmp_path) == 5
        _, proof = proof_of(policy.job, checkpoints=tmp_path)
        assert (proof.differs, proof.since, proof.commits, proof.learners) == ("", 0, 5, 2)
        _, alone = proof_of(policy.job)
        assert (alone.differs, alone.since, alone.commits, alone.learners) == ("", 3, 5, 1)
        _, since = proof_of(policy.job, checkpoints=tmp_path, start=found)
        assert since.differs == ""


def test_a_finished_job_is_restored_finished_and_goes_on_with_a_learner(store: Store, tmp_path: Path) -> None:
    with store.publisher("policy", _model(0)) as policy:
        policy.publish(_model(1))
    found = Checkpoint.load(saved(store.job("policy"), tmp_path))
    assert found.finished
    job = store.restore_job(found, "again")
    assert job.state().finished(job.config)
    assert not store.watch("again").running
    with store.publisher("again", _model(0)) as policy:
        assert store.watch("again").running
        assert policy.publish(_model(2)) == 2
    assert [fields["kind"] for _, fields in log_entries(job)][:2] == ["restore", "stop"]


@pytest.mark.parametrize("every", [1, 3])
def test_a_learner_writes_checkpoints_and_moves_its_log(store: Store, tmp_path: Path, every: int) -> None:
    directory = tmp_path / "new" / "place"
    with store.publisher("policy", _model(0), checkpoints=directory, checkpoint_every=every) as policy:
        for version in range(1, 8):
            policy.publish(_model(version))
    found = newest(directory, "policy")
    assert found
    assert (found.checkpoint.version, found.checkpoint.finished) == (7, True), "the last one, when it finishes"
    assert check_chain(policy.job, directory) == 7
    assert next(iter(log_entries(policy.job)))[1].get("version") != "1", "what a checkpoint has is moved"
    proof = proof_of(policy.job, checkpoints=directory)[1]
    assert (proof.differs, proof.since, proof.commits) == ("", 0, 7)
    store.remove_job("policy")
    store.restore_job(found.checkpoint)
    with store.publisher("policy", _model(0), checkpoints=directory) as policy:
        model = _model(0)
        assert policy.load(model) == 7
        assert _same(model, _model(7))
        policy.publish(_model(8))
    assert check_chain(policy.job, directory) == 8
    assert proof_of(policy.job, checkpoints=directory)[1].commits == 8


def test_a_directory_that_cannot_be_is_refused(store: Store, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for where in (tmp_path / "file", Path("/proc/none")):
        with pytest.raises(kvps.InvalidSetting, match="checkpoints"):
            store.publisher("policy", _model(0), checkpoints=where)
    assert store.jobs() == []


def test_another_model_is_refused_after_a_restore(store: Store, tmp_path: Path) -> None:
    with store.publisher("policy", _model(0)) as policy:
        policy.publish(_model(1))
        found = Checkpoint.load(saved(policy.job, tmp_path))
    store.restore_job(found, "again")
    other = _model(0) | {"h": np.zeros((3, 5), np.float32)}
    with pytest.raises(kvps.LayoutMismatch, match="they differ in h"):
        store.publisher("again", other)
    untied = _model(0)
    untied["head"] = untied["head"].copy()
    with pytest.raises(kvps.LayoutMismatch):
        store.publisher("again", untied)


def test_the_state_of_a_version_is_kept_with_it(store: Store, tmp_path: Path) -> None:
    big, small = np.arange(400_000, dtype=np.float64), np.full(4, 1.00390625, np.float32)  # not a bfloat16
    with store.publisher("policy", {"x": small}, dtype="bf16", checkpoints=tmp_path, checkpoint_every=2) as policy:
        for version in (1, 2, 3):
            state = {"master": small * version, "m": big + version, "step": version, "rng": b"\0\1"}
            assert policy.publish({"x": small * version}, state=state, wait=False) == version
        mine, found = {"x": small.copy()}, {"old": 1}
        assert policy.load(mine, state=found) == 3
        assert list(found) == ["master", "m", "step", "rng"]
        assert found["m"].tobytes() == (big + 3).tobytes()
        assert (found["step"], found["rng"]) == (3, b"\0\1")
        assert np.array_equal(found["master"], small * 3)
        assert not np.array_equal(mine["x"], small * 3)
        with pytest.raises(kvps.InvalidSetting, match=r"^state: "):
            policy.publish(mine, state={"nested": {}})
    store.remove_job("policy")
    with store.publisher("policy", {"x": small}, dtype="bf16", checkpoints=tmp_path, resume=True) as policy:
        assert policy.load(mine, state=found) == 3
        assert np.array_equal(found["master"], small * 3)
        assert policy.publish(mine) == 4
        assert policy.load(mine, state=found) == 4
        assert found == {}


def test_what_is_lost_without_it_is_said(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    with store.publisher("policy", {"x": np.full(4, 1.5, np.float32)}, dtype="bf16") as policy:
        policy.publish({"x": np.full(4, 1.00390625, np.float32)})
        policy.load({"x": np.zeros(4, np.float32)})
    assert "version 1 has x in fewer bits than this model, and what was rounded off is lost" in caplog.text
