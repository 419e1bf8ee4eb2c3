"""Local steps of tasks, held against a plain loop of NumPy, and computed again by kvps verify."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from helpers.arrays import assert_same_bits
from helpers.digits_job import digits_job, proved, run_workers, training
from helpers.harness import aggregating, await_version
from kvps_workers import load_task
from kvps_workers.contributions import Contributions
from kvps_workers.local_steps import LocalSteps
from kvps_workers.rounds import Rounds

import kvps
from kvps.arrays.layout import Layout
from kvps.config import JobConfig, division_of
from kvps.device.base import CPU
from kvps.optim.schedules import LinearLR
from kvps.store import Store

Params = dict[str, np.ndarray]
MEAN = kvps.SGD(lr=1.0)
STEPS = 4  # of 15 batches: the last round has three


def _plain(config: JobConfig, momentum: float = 0.0, beyond: float = 1.0) -> Params:
    """BSP in a few lines: each worker steps on its next batches, and the mean of how far they came is subtracted. With
    the reduction weighted, each counts by its samples."""
    task = load_task("digits")
    params = {name: np.array(array) for name, array in task.parameters(0).items()}
    lr, ranks = np.float32(0.5), range(config.workers)
    rounds = [Rounds(task, config, rank, np) for rank in ranks]
    buffers = [{name: np.zeros_like(array) for name, array in params.items()} for _ in ranks]
    total = config.epochs * rounds[0].batches_per_epoch
    for first in range(0, total, config.local_steps):
        came, shares = [], []
        for rank in ranks:
            weights = dict(params)
            numbers = range(first, min(first + config.local_steps, total))
            samples = sum(len(rounds[rank].rows(number)) for number in numbers)
            shares.append(np.float32(samples if config.reduction == "weighted" else 1))
            for number in numbers:
                _, grads = task.gradient(weights, rounds[rank].samples(rounds[rank].rows(number)), np)
                for name, grad in grads.items():
                    buffers[rank][name] = buffers[rank][name] * np.float32(momentum) + grad
                    weights[name] = weights[name] - buffers[rank][name] * lr
            came.append({name: params[name] - weights[name] for name in params})
        for name in params:
            summed = shares[0] * came[0][name]
            for share, other in zip(shares[1:], came[1:], strict=True):
                summed = summed + share * other[name]
            params[name] = params[name] - summed / np.sum(shares) * np.float32(beyond)
    return params


def _settings(**settings: Any) -> dict[str, Any]:
    return {"optimizer": MEAN, "local_steps": STEPS, "inner_optimizer": kvps.SGD(lr=0.5)} | settings


@pytest.mark.parametrize("outer", [1.0, 0.7])
def test_a_run_is_a_plain_loops_and_is_computed_again(store: Store, outer: float) -> None:
    job = digits_job(store, **_settings(optimizer=kvps.SGD(lr=outer)))
    run_workers(job, *training(job, "w0", "w1", "w2"))
    assert job.state().version == division_of(480, JobConfig(batch_size=96, epochs=3, local_steps=STEPS)).units == 4
    assert_same_bits(job.snapshot()[1], _plain(job.config, beyond=outer))
    proof = proved(job)
    assert (proof.by, proof.contributions) == ("recomputed", 12)


def test_fedavg_weighs_workers_by_their_samples(store: Store) -> None:
    """Of 1438 samples w0 has one more than the others. A round is an epoch."""
    job = digits_job(store, **_settings(local_steps=5, reduction="weighted"))
    run_workers(job, *training(job, "w0", "w1", "w2"))
    assert [[c.weight for c in commit.plan.contributions] for commit in job.log()] == [[480, 479, 479]] * 3
    assert_same_bits(job.snapshot()[1], _plain(job.config))
    assert proved(job).by == "recomputed"


def test_momentum_goes_on_over_rounds_and_is_proved_by_a_record(store: Store, tmp_path: Path) -> None:
    job = digits_job(store, **_settings(inner_optimizer=kvps.SGD(lr=0.5, momentum=0.5)))
    run_workers(job, *training(job, "w0", "w1", "w2"), record=tmp_path)
    assert_same_bits(job.snapshot()[1], _plain(job.config, momentum=0.5))
    assert proved(job).by == ""
    assert proved(job, tmp_path).by == "recorded"


@pytest.mark.parametrize("inner", [kvps.SGD(lr=0.5, momentum=0.5), kvps.Adam(lr=0.01)], ids=["momentum", "adam"])
def test_in_rounds_of_units_the_inner_state_begins_anew_and_is_computed_again(
    store: Store, inner: kvps.optim.Optimizer
) -> None:
    """So the weights are the same from one worker and from two, and need no record to be proved."""
    units = division_of(1438, JobConfig(batch_size=96, epochs=2, local_steps=STEPS)).units
    weights = []
    for workers in (1, 2):
        settings = _settings(inner_optimizer=inner, units=units, units_per_round=3, workers=workers, epochs=2)
        job = digits_job(store, **settings)
        run_workers(job, *training(job, *[f"w{number}" for number in range(workers)]))
        assert proved(job).by == "recomputed"
        weights.append(job.snapshot()[1])
        store.remove_job("digits")
    assert_same_bits(weights[1], weights[0])


@pytest.mark.parametrize(
    "settings",
    [
        {"staleness": 1, "gradient_format": "int8"},
        {"weight_format": "bf16", "optimizer": kvps.SGD(lr=0.7, momentum=0.9, nesterov=True)},
        {"inner_optimizer": kvps.SGD(lr=LinearLR(0.5, 0.1, 12), weight_decay=0.01), "shards": 2},
        {"units": division_of(1438, JobConfig(batch_size=96, epochs=3, local_steps=STEPS)).units + 2, "staleness": -1},
    ],
    ids=str,
)
def test_every_mode_and_format_is_computed_again(store: Store, settings: Mapping[str, Any]) -> None:
    job = digits_job(store, **_settings(**settings))
    run_workers(job, *training(job, "w0", "w1", "w2"))
    assert proved(job).by == "recomputed"


class Seen:
    """A task whose samples are their numbers, which notes the batches that it is given."""

    batch_size, epochs, lr = 3, 2, 0.5

    def __init__(self, samples: int = 22, spoilt: int = -1) -> None:
        self.batches: list[list[int]] = []
        self._samples, self._spoilt = samples, spoilt

    def parameters(self, seed: int) -> Params:
        return {"x": np.zeros(2, np.float32)}

    def data(self, rank: int, workers: int, xp: ModuleType) -> Any:
        return (np.arange(self._samples)[rank::workers],)

    def gradient(self, params: Mapping[str, Any], batch: Any, xp: ModuleType) -> Any:
        with pytest.raises(ValueError, match="read-only"):
            params["x"][0] = 1
        self.batches.append(batch[0].tolist())
        value = math.nan if len(self.batches) - 1 == self._spoilt else 1.0
        return float(len(self.batches)), {"x": np.full(2, value, np.float32)}

    def evaluate(self, params: Mapping[str, Any], xp: ModuleType) -> Any:
        return {"loss": 0.0}


@pytest.mark.parametrize("units", [0, division_of(22, JobConfig(batch_size=3, epochs=2, local_steps=5)).units])
def test_each_epoch_has_every_sample_once(store: Store, monkeypatch: pytest.MonkeyPatch, units: int) -> None:
    """A round, or a unit, is as many batches as there are local steps; the last one has what is left."""
    task = Seen()
    monkeypatch.setattr("kvps_workers.training_loop.load_task", lambda name: task)
    settings = {"task": "seen", "batch_size": 3, "epochs": 2, "local_steps": 5, "optimizer": MEAN, "units": units}
    job = store.create_job("job", task.parameters(0), **settings)
    run_workers(job, *training(job, "w0"))
    assert [len(batch) for batch in task.batches] == 2 * [3, 3, 3, 3, 3, 3, 3, 1]
    for epoch in (task.batches[:8], task.batches[8:]):
        assert Counter(sample for batch in epoch for sample in batch) == Counter(range(22))
    assert job.state().version == division_of(22, JobConfig(batch_size=3, epochs=2, local_steps=5)).units == 4
    np.testing.assert_allclose(job.snapshot()[1]["x"], -0.1 * 16, rtol=1e-6)


def _local(task: Seen, **settings: Any) -> LocalSteps:
    layout = Layout.of(task.parameters(0), 1)
    return LocalSteps(task, JobConfig(local_steps=3, **settings), layout, CPU)


def test_the_loss_is_the_mean_and_the_weights_pulled_stay() -> None:
    task, pulled = Seen(), {"x": np.ones(2, np.float32)}
    batches = [(float(n), (np.arange(3),)) for n in range(3)]
    local = _local(task, inner_optimizer=kvps.SGD(lr=LinearLR(0.25, 0.75, 2)))
    loss, pseudo = local.pseudo_gradient(pulled, batches, 0)
    assert loss == 2.0
    np.testing.assert_array_equal(pseudo["x"], 0.25 + 0.5 + 0.75)
    np.testing.assert_array_equal(pulled["x"], 1)


def test_a_gradient_with_nan_reaches_no_optimizer() -> None:
    pulled = {"x": np.ones(2, np.float32)}
    batches = [(0.0, (np.arange(3),)) for _ in range(3)]
    momentum = kvps.SGD(lr=0.5, momentum=0.5)
    with pytest.raises(kvps.NotFinite, match="lower the inner learning rate"):
        _local(Seen(spoilt=1), inner_optimizer=momentum).pseudo_gradient(pulled, batches, 0)
    local = _local(Seen(spoilt=1), inner_optimizer=momentum, nonfinite="skip")
    _, pseudo = local.pseudo_gradient(pulled, batches, 0)
    np.testing.assert_array_equal(pseudo["x"], 0.5 + 0.75)


def test_a_gradient_that_does_not_fit_is_refused() -> None:
    class Wrong(Seen):
        def gradient(self, params: Mapping[str, Any], batch: Any, xp: ModuleType) -> Any:
            return 0.0, {"x": np.zeros(3, np.float32)}

    with pytest.raises(kvps.LayoutMismatch, match=r"gradient 'x' has shape \(3,\), the job's has \(2,\)"):
        _local(Wrong()).pseudo_gradient({"x": np.ones(2, np.float32)}, [(0.0, (np.arange(3),))], 0)


# -- a worker that comes back --------------------------------------------------------------------------------------


class Failing(Seen):
    """Stops its worker once, in the middle of a round."""

    def __init__(self, after: int) -> None:
        super().__init__(samples=60)
        self._after = after

    def gradient(self, params: Mapping[str, Any], batch: Any, xp: ModuleType) -> Any:
        if len(self.batches) == self._after:
            self._after = -1
            raise kvps.TaskFailed("stopped")
        self.batches.append(batch[0].tolist())
        return 0.0, {"x": np.full(2, batch[0].mean(), np.float32) + params["x"]}


@pytest.mark.parametrize(
    ("inner", "after"), [(kvps.SGD(lr=0.01, momentum=0.5), 0), (kvps.Adam(lr=0.01), 5), (kvps.Adam(lr=0.01), 8)]
)
def test_the_inner_state_of_what_was_accepted_survives(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, inner: Any, after: int
) -> None:
    """Who is stopped between or within rounds goes on, and ends with the same bits."""
    ends = []
    for stopped in (-1, after):
        task = Failing(stopped)
        monkeypatch.setattr("kvps_workers.training_loop.load_task", lambda name, task=task: task)
        settings = {"task": "mine", "batch_size": 4, "epochs": 1, "local_steps": 4, "optimizer": MEAN}
        job = store.create_job(f"job-{stopped}", task.parameters(0), inner_optimizer=inner, **settings)
        (train,) = training(job, "w0")

        def work(train: Callable[[], None] = train, stopped: int = stopped) -> None:
            if stopped >= 0:
                with pytest.raises(kvps.TaskFailed, match="stopped"):
                    train()
            train()

        run_workers(job, work)
        ends.append(job.snapshot()[1]["x"])
    np.testing.assert_array_equal(*ends)
    assert "starts anew" not in caplog.text


def test_after_an_eviction_the_inner_state_starts_anew_and_that_is_said(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    job = digits_job(store, workers=1, **_settings(inner_optimizer=kvps.Adam(lr=0.01)))
    session = job.join("w0")
    session.pull()
    session.push({p.name: np.zeros(p.shape, np.float32) for p in job.layout.parameters})
    job.access.scripts.evict("w0", session.incarnation)
    run_workers(job, *training(job, "w0"))
    assert caplog.text.count("its inner adam starts anew") == 1


def test_a_state_of_another_model_is_refused() -> None:
    local = _local(Seen(), inner_optimizer=kvps.Adam())
    good = {"m": np.ones(2, np.float32), "v": np.ones(2, np.float32), "taken": np.array(3, np.int64)}
    assert local.restore(good)
    np.testing.assert_array_equal(local.state(0)["m"], good["m"])
    for wrong in (
        {"m": np.ones(3, np.float32)},
        {"taken": np.array(0, np.int64)},
        {"taken": np.array([3], np.int64)},
        {"v": np.ones(2, np.float64)},
        {"other": np.ones(2, np.float32)},
    ):
        with pytest.raises(kvps.CorruptData, match="fits another optimizer or model"):
            local.restore(good | wrong)


def test_a_contribution_that_was_not_accepted_leaves_no_trace() -> None:
    """It is computed anew from the state before it, and that is what a worker that leaves then stores."""
    pulled = {"x": np.ones(2, np.float32)}
    batches = [(0.0, (np.arange(3),)) for _ in range(3)]
    local, plain = (_local(Seen(), inner_optimizer=kvps.SGD(lr=0.5, momentum=0.5)) for _ in range(2))
    for accepted in range(2):
        wanted = plain.pseudo_gradient(pulled, batches, accepted)[1]["x"].copy()
        for _ in range(3):
            np.testing.assert_array_equal(local.pseudo_gradient(pulled, batches, accepted)[1]["x"], wanted)
            if accepted:
                assert local.state(accepted)["taken"] == 3
        assert local.state(accepted + 1)["taken"] == 3 * (accepted + 1)
        np.testing.assert_array_equal(local.state(accepted + 1)["momentum"], plain.state(accepted + 1)["momentum"])


def test_a_round_that_was_dropped_leaves_no_trace(store: Store) -> None:
    """It uses up a sequence number, and is not accepted: its steps stayed in the inner momentum."""
    settings = {"quorum": 1, "late": "drop", "workers": 2}
    job = digits_job(store, **_settings(inner_optimizer=kvps.SGD(lr=0.5, momentum=0.5), **settings))
    with aggregating(job), job.join("w0") as first, job.join("w1") as second:
        mine, other = (Contributions(job, load_task("digits"), rank, CPU) for rank in range(2))
        pulled, weights = first.pull(), second.pull()
        first.push(mine.compute(pulled, 0, first.accepted).grads)
        await_version(job, 1)
        late = other.compute(weights, 0, second.accepted)
        with pytest.raises(kvps.ContributionLate):
            second.push(late.grads)
        assert (second.sequence, second.accepted) == (1, 0)
        assert other.state(second.accepted) == {}
        again = other.compute(weights, 0, second.accepted)
        assert again.loss == late.loss
