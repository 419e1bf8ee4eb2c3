"""Clipping by the global norm: PyTorch's factor, whoever holds the shards, in a replay, and with nonsense in Redis."""

from __future__ import annotations

import re
import threading
from contextlib import ExitStack

import numpy as np
import pytest
from helpers.harness import aggregating, any_floats, await_version, gradient, large_model, log_entries, model, work
from kvps_aggregator import Aggregator
from kvps_aggregator.step.clipping import outlier, scale_of, square_sum

import kvps
from kvps.optim import from_json
from kvps.store import Store

LR = 0.1
CLIPPED = kvps.SGD(lr=0.1, momentum=0.9, clip_norm=0.7)


@pytest.mark.parametrize("items", [0, 1, 2, 3, 7, 1000, 262_144])
def test_the_sum_of_squares(items: int) -> None:
    array = any_floats(items, items)
    want = float(np.sum(array.astype(np.float64) ** 2))
    assert square_sum(array) == pytest.approx(want, rel=1e-12)


def test_a_gradient_is_scaled_only_if_it_is_too_long() -> None:
    assert scale_of(5.0, [9.0, 7.0]) == 1
    assert scale_of(2.0, [9.0, 7.0]) == np.float32(2 / (4 + 1e-6))
    assert scale_of(2.0, [float("inf")]) == 0
    assert scale_of(1.0, []) == 1


def test_the_scale_is_that_of_torch() -> None:
    torch = pytest.importorskip("torch")
    parameter = torch.zeros(1000, requires_grad=True)
    gradient = np.random.default_rng(0).standard_normal(1000, np.float32)
    parameter.grad = torch.tensor(gradient)
    assert torch.nn.utils.clip_grad_norm_([parameter], 0.7) > 0.7
    scale = scale_of(0.7, [square_sum(gradient[:300]), square_sum(gradient[300:])])
    np.testing.assert_allclose(gradient * scale, parameter.grad.numpy(), rtol=1e-5)


def test_all_shards_are_clipped_alike_whoever_holds_them(store: Store) -> None:
    """Two aggregators hold three shards. Sums of other parts are rounded otherwise, and so is the norm."""
    ends = []
    for name, held in (("whole", [[0]]), ("divided", [[0, 2], [1]])):
        job = store.create_job(name, model(), workers=2, shards=sum(map(len, held)), optimizer=CLIPPED)
        with ExitStack() as stack:
            for shards in held:
                stack.enter_context(aggregating(job, shards=shards))
            work(job, 6, lambda session, params, round_: gradient(params, session.rank, round_), workers=2)
            job.await_finished()
        ends.append(np.concatenate([array.reshape(-1) for array in job.snapshot()[1].values()]))
    np.testing.assert_allclose(ends[1], ends[0], rtol=2e-5, atol=2e-6)


def test_a_clipped_model_of_many_chunks_is_that_of_a_loop(store: Store) -> None:
    job = store.create_job("job", large_model(), optimizer=kvps.SGD(lr=0.5, clip_norm=3.0))
    with aggregating(job), job.join("w0") as session:
        params = session.pull()
        grads = {name: np.asarray(value * np.float32(0.5), np.float32) for name, value in params.items()}
        before = {name: value.copy() for name, value in params.items()}
        session.push(grads)
        after = session.pull()
        norm = np.sqrt(sum(float(np.sum(g.astype(np.float64) ** 2)) for g in grads.values()))
        scale = np.float32(3.0 / (norm + 1e-6))
        for name, grad in grads.items():
            np.testing.assert_array_equal(after[name], before[name] - grad * scale * np.float32(0.5))


def test_a_bad_contribution_of_a_clipped_job_is_rejected(store: Store) -> None:
    """One of two shards finds it; the other has measured the plan that had it."""
    job = store.create_job("job", model(), workers=2, shards=2, optimizer=CLIPPED)
    with job.join("w0") as first, job.join("w1") as second:
        for session in (first, second):
            session.pull()
            session.push(gradient(model(), session.rank, 0))
        job.access.client.call("SETRANGE", job.access.keys.gradient(1, "w1", second.incarnation, 1, 0), 0, "bad!")
        with aggregating(job, shards=[0]), aggregating(job, shards=[1]):
            first.pull()
    (commit,) = job.log()
    assert [c.worker for c in commit.plan.contributions] == ["w0"]
    assert [c.worker for c in commit.plan.rejected] == ["w1"]


def test_nonsense_among_the_norms_is_one_line(store: Store) -> None:
    job = store.create_job("job", model(), shards=2, optimizer=CLIPPED)
    with job.join("w0") as session:
        session.pull()
        session.push(model())
        plan = job.access.scripts.plan().plan
        mark = f"{plan.history}:{plan.id}"
        job.access.client.call("HSET", job.access.keys.square_sums, "mark", mark, "1", "nonsense")
        aggregator = Aggregator(job, threading.Event(), [0])
        aggregator.hold()
        with pytest.raises(kvps.CorruptData, match=r"kvps:\{job\}:square_sums"):
            aggregator.work()
        aggregator.release()


def test_clipping_is_stored_only_where_it_is_asked_for() -> None:
    assert "clip_norm" not in kvps.SGD().to_json()
    assert from_json(CLIPPED.to_json()) == CLIPPED
    with pytest.raises(kvps.InvalidSetting, match="clip_norm must not be negative"):
        kvps.SGD(clip_norm=-1.0)
    with pytest.raises(kvps.InvalidSetting, match="no setting 'clip_norm' for a group"):
        kvps.SGD(groups=(kvps.ParameterGroup("W", clip_norm=1.0),))


@pytest.mark.parametrize("shards", [1, 2])
def test_an_outlier_is_rejected_and_its_reason_is_logged(store: Store, shards: int) -> None:
    """Two aggregators hold two shards, and agree. The others count as if it had not been there."""
    job = store.create_job("job", model(), workers=4, shards=shards, reject_norm=5, quorum=4, optimizer=kvps.SGD(lr=LR))
    small = {name: np.full_like(value, 0.01) for name, value in model().items()}
    huge = {name: value * np.float32(100) for name, value in small.items()}
    with ExitStack() as stack:
        for shard in range(shards):
            stack.enter_context(aggregating(job, shards=[shard]))
        sessions = [stack.enter_context(job.join(f"w{rank}")) for rank in range(4)]
        for session in sessions:
            session.pull()
        for session in sessions:
            session.push(huge if session.rank == 2 else small)
        await_version(job, 1)
    (commit,) = job.log()
    assert [c.worker for c in commit.plan.contributions] == ["w0", "w1", "w3"]
    assert [c.worker for c in commit.plan.rejected] == ["w2"]
    (reason,) = [fields["reason"] for _, fields in log_entries(job) if fields["kind"] == "reject"]
    assert re.fullmatch(r"its norm [0-9.]+ is more than 5 times the median, [0-9.]+", reason)


def test_two_contributions_have_no_outlier() -> None:
    assert outlier(2.0, [[1.0, 10_000.0]]) is None
    assert outlier(None, [[1.0, 1.0, 10_000.0]]) is None
    assert outlier(2.0, [[1.0, 1.0, 4.0]]) is None
    assert outlier(2.0, [[1.0, 1.0, 2.0], [0.0, 0.0, 2.1]]) == (2, "its norm 2.025 is more than 2 times the median, 1")
