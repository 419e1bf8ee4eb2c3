"""Jobs over shared memory: the same bits as through Redis, and nothing is copied that need not be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.commands import kvps_run
from helpers.harness import aggregating, check_chain, gradient, model, work
from helpers.internals import segments_of
from helpers.shared_memory import LARGE, OVER_SHM, bits, committed, segment_names
from helpers.waiting import eventually

import kvps
from kvps.history.checkpoint import Checkpoint
from kvps.machine import process
from kvps.session.session import Session
from kvps.store import Store

# -- the same as through Redis -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("optimizer", "gradient_format"), [(kvps.Adam(0.05), "fp32"), (kvps.SGD(0.05), "int8")])
def test_it_makes_no_difference_to_a_bit_how_arrays_move(store: Store, optimizer: Any, gradient_format: str) -> None:
    """With several chunks, which are made on several threads, and with optimizer state."""

    def quick(session: Session, params: dict[str, np.ndarray], round_: int) -> dict[str, np.ndarray]:
        return {name: (np.float32(0.1) * value + session.rank - round_) for name, value in params.items()}

    start = {"a": np.linspace(-1, 1, 600_000, dtype=np.float32), **model()}
    jobs = []
    for transport in ("redis", "shm"):
        settings = {**OVER_SHM, "transport": transport}
        job = store.create_job(
            transport, start, workers=2, optimizer=optimizer, gradient_format=gradient_format, **settings
        )
        assert job.config.transport == transport
        with aggregating(job):
            work(job, 6, quick, 2)
            assert committed(job, 6)
        jobs.append(job)
    assert bits(jobs[0]) == bits(jobs[1])
    assert [c.plan.contributions[1].digests for c in jobs[0].log()] == [
        c.plan.contributions[1].digests for c in jobs[1].log()
    ]


@pytest.mark.parametrize("staleness", [2, -1])
def test_the_weights_are_exactly_the_sum_of_what_was_acknowledged(store: Store, staleness: int) -> None:
    ones = {"x": np.zeros(300_000, np.float32)}
    settings = {"workers": 3, "staleness": staleness, "reduction": "sum", "optimizer": kvps.SGD(lr=1.0)}
    job = store.create_job("job", ones, **settings, **OVER_SHM)
    with aggregating(job):
        work(job, 20, lambda session, params, round_: {"x": np.full(300_000, -1, np.float32)}, 3)
        assert eventually(lambda: sum(job.state().clock.values()) == 60)
    assert (job.snapshot()[1]["x"] == 60).all()


# -- without a copy ------------------------------------------------------------------------------------------------


def test_what_is_computed_into_the_buffers_is_pushed_as_it_lies_there(store: Store) -> None:
    job = store.create_job("job", LARGE, optimizer=kvps.SGD(lr=1.0), **OVER_SHM)
    with aggregating(job), job.join("w0") as session:
        for round_ in range(5):
            weights = session.pull()["x"]
            assert (weights == -sum(range(round_))).all()
            with pytest.raises(ValueError, match="read-only"):
                weights[0] = 1
            grads = session.buffers()
            grads["x"][:] = round_
            (name,) = segment_names(job, f"g:w0.{session.incarnation}:{round_ + 1}")
            with segments_of(job).open(name, 2_400_000) as there:  # type: ignore[union-attr]
                assert (there.view(np.float32) == round_).all(), "it is there before it is pushed"
            session.push(grads)
            with pytest.raises(ValueError, match="read-only"):
                grads["x"][0] = 1  # it is a contribution now
        session.pull()
        assert len(segment_names(job, "g:")) <= 2, "they are written anew"
    assert check_chain(job) == 5


def test_a_gradient_in_another_ones_buffer_is_refused_before_anything_is_written(store: Store) -> None:
    params = {name: np.zeros(300_000, np.float32) for name in "ab"}
    job = store.create_job("job", params, optimizer=kvps.SGD(lr=1.0), **OVER_SHM)
    with aggregating(job), job.join("w0") as session:
        session.pull()
        grads = session.buffers()
        grads["a"][:], grads["b"][:] = 1, 2
        with pytest.raises(kvps.LayoutMismatch, match="lies in another one's buffer"):
            session.push({"a": grads["b"], "b": grads["a"]})
        with pytest.raises(kvps.LayoutMismatch, match="lies in another one's buffer"):
            session.put("a", grads["b"])
        session.push(grads)
        weights = session.pull()
        assert (weights["a"] == -1).all()
        assert (weights["b"] == -2).all()


def test_pulled_weights_stay_as_they_are_however_many_versions_are_committed(store: Store) -> None:
    """Their memory is given to no other version while they are in use: under ASP, and after their session ended."""
    job = store.create_job("job", LARGE, workers=2, staleness=-1, optimizer=kvps.SGD(lr=1.0), **OVER_SHM)
    with aggregating(job), job.join("w0") as quick, job.join("w1") as slow:
        quick.pull()
        quick.push({"x": np.full(600_000, -1, np.float32)})
        assert committed(job, 1)
        with job.join("w2") as gone:
            kept = gone.pull()["x"][10:20]
        del gone
        held, at = slow.pull()["x"], slow.version
        before = held.copy()
        for _ in range(40):
            quick.pull()
            quick.push({"x": np.full(600_000, -1, np.float32)})
        assert eventually(lambda: job.state().version >= at + 20)
        assert held.tobytes() == before.tobytes()
        assert (kept == before[10:20]).all()
        assert slow.pull()["x"][0] >= 10


# -- checkpoints, proofs -------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("seldom_mirrored")
def test_a_checkpoint_is_made_of_memory_and_restored_anywhere(store: Store, tmp_path: Path) -> None:
    settings = {"workers": 1, "optimizer": kvps.Adam(0.05)}
    whole = store.create_job("whole", model(), **settings, **OVER_SHM)
    with aggregating(whole):
        work(whole, 12, lambda session, params, round_: gradient(params, session.rank, round_), 1)
        assert committed(whole, 12)
    job = store.create_job("job", model(), **settings, **OVER_SHM)
    with aggregating(job):
        session = job.join("w0")
        for _ in range(7):
            session.push(gradient(session.pull(), 0, session.round))
        assert committed(job, 7)
        path = tmp_path / "c.safetensors"
        job.checkpoint().write(path)
        session.leave(finished=False)
    for name, shards in (("again", None), ("shards", 2)):
        restored = store.restore_job(Checkpoint.load(path), name, shards)
        assert restored.config.transport == "redis", "it is small"
        with aggregating(restored), restored.join("w0") as session:
            while session.round < 12:
                session.push(gradient(session.pull(), 0, session.round))
            assert committed(restored, 12)
        assert bits(restored) == bits(whole)


# -- on the command line -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_status_says_where_the_arrays_are(store: Store) -> None:
    store.create_job("job", model(), **OVER_SHM)
    said = kvps_run("status", "job", "--redis", store.url).stdout
    assert f"arrays in the shared memory of {process.host()}; Redis has version 0" in said
