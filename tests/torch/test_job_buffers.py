"""Buffers that are in a job: the mean of the workers' own or those of the lowest rank, as exactly once as weights."""

from __future__ import annotations

import textwrap
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.arrays import assert_same_bits
from helpers.ddp import batch, loss_of, net, weights_of
from helpers.digits_job import proved, run_workers
from helpers.harness import aggregating, await_version, check_chain
from helpers.pages import python_in
from torch import nn

import kvps
import kvps.torch
from kvps.arrays.pieces import BUFFER_KINDS
from kvps.history.checkpoint import Checkpoint
from kvps.store import Store

Arrays = dict[str, np.ndarray]
NAMES = ("1.running_mean", "1.running_var")
RECIPE = kvps.AdamW(
    kvps.schedules.StepLR(0.05, 2, 0.5), clip_norm=0.05, groups=(kvps.ParameterGroup("*", weight_decay=0.5),)
)


def create(store: Store, model: nn.Module, buffers: str, name: str = "job", **settings: Any) -> kvps.Job:
    settings = {"workers": 2, "optimizer": kvps.SGD(lr=0.05, momentum=0.9)} | settings
    settings = {"transport": "redis", "worker_timeout_ms": 60_000} | settings
    return store.create_job(name, kvps.torch.parameters(model, buffers=buffers), **settings)


def buffers_of(model: nn.Module) -> Arrays:
    return {name: model.get_buffer(name).float().numpy().copy() for name in NAMES}


class Seen:
    """What the workers had: round -> buffers as pulled, and (round, rank) -> their own after the forward pass."""

    def __init__(self) -> None:
        self.pulled: dict[int, Arrays] = {}
        self.own: dict[tuple[int, int], Arrays] = {}

    def round(self, worker: kvps.torch.TorchSession, model: nn.Module, weight: int | None = None) -> None:
        rank, number = worker.session.rank, worker.session.round
        worker.pull()
        if worker.session.round in self.pulled:
            assert_same_bits(buffers_of(model), self.pulled[number])
        self.pulled[number] = buffers_of(model)
        loss_of(model, rank, number).backward()
        self.own[number, rank] = buffers_of(model)
        worker.step(weight=weight)


def mean(all_: list[Arrays], weights: list[int]) -> Arrays:
    """The mean as the docstring of the aggregator's `reduce_buffers` has it, in float32."""
    found, total = dict(all_[0]), weights[0]
    for each, weight in zip(all_[1:], weights[1:], strict=True):
        total += weight
        found = {name: m + (each[name] - m) * np.float32(weight / total) for name, m in found.items()}
    return found


Round = Callable[[kvps.torch.TorchSession, nn.Module], None]


def train(job: kvps.Job, rounds: int, round_: Round, record: Path | None = None, **how: Any) -> list[nn.Module]:
    """Each worker on a thread, with a model of its own, until it has done `rounds` rounds; return the models."""
    models = [net() for _ in range(job.config.workers)]
    together = threading.Barrier(len(models))

    def run(number: int) -> None:
        with kvps.torch.join(job, models[number], f"w{number}", **how) as worker:
            together.wait(120)
            while worker.session.round < rounds:
                round_(worker, models[number])

    run_workers(job, *(partial(run, number) for number in range(len(models))), record=record)
    check_chain(job)
    return models


# -- what a version has ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "workers", "settings"),
    [
        ("average", 3, {"shards": 3}),
        ("average", 3, {"optimizer": RECIPE, "reduction": "median", "reject_norm": "50"}),
        ("average", 2, {"reduction": "weighted", "optimizer": RECIPE, "transport": "shm"}),
        ("rank0", 3, {"reduction": "sum", "optimizer": kvps.Lion(0.01), "shards": 2}),
        ("rank0", 2, {"transport": "shm"}),
    ],
    ids=str,
)
def test_each_version_has_those_of_its_contributions(
    store: Store, tmp_path: Path, kind: str, workers: int, settings: dict[str, Any]
) -> None:
    """By hand, from what each worker had after its forward pass, round by round; a replay makes the same bits. Those
    of rank 0 are sent with gradients that leave during backward."""
    job, seen, rounds = create(store, net(), kind, workers=workers, **settings), Seen(), 4
    weights = [3, 5, 1][:workers] if settings.get("reduction") == "weighted" else [1] * workers
    given = weights if len(set(weights)) > 1 else [None] * workers  # type: ignore[list-item]

    def round_(worker: kvps.torch.TorchSession, model: nn.Module) -> None:
        seen.round(worker, model, given[worker.session.rank])

    train(job, rounds, round_, tmp_path, overlap=kind == "rank0")
    last = {name: array for name, array in job.snapshot()[1].items() if name in NAMES}
    for number in range(rounds):
        own = [seen.own[number, rank] for rank in range(workers)]
        assert not np.array_equal(own[0][NAMES[0]], own[1][NAMES[0]])
        want = own[0] if kind == "rank0" else mean(own, weights)
        assert_same_bits(seen.pulled.get(number + 1, last), want)
    assert (proved(job, tmp_path).by, job.state().version) == ("recorded", rounds)


def one_round(worker: kvps.torch.TorchSession, model: nn.Module) -> None:
    worker.pull()
    loss_of(model, worker.session.rank, worker.session.round).backward()
    worker.step()


# -- who comes, goes and dies ---------------------------------------------------------------------------------------


def test_rank_0_is_evicted_and_the_next_rank_stands_in(store: Store, tmp_path: Path) -> None:
    job, seen, models = create(store, net(), "rank0"), Seen(), [net(), net()]
    with aggregating(job, record=tmp_path):
        first, second = (kvps.torch.join(job, model, f"w{rank}") for rank, model in enumerate(models))
        for _ in range(2):
            seen.round(first, models[0])
            seen.round(second, models[1])
        job.evict(job.state().members["w0"])
        while second.session.round < 5:
            seen.round(second, models[1])
        second.leave()
        await_version(job, 5)
    came = [[c.worker for c in commit.plan.contributions] for commit in job.log()]
    assert came == [["w0", "w1"]] * 2 + [["w1"]] * 3
    for number in (2, 3):
        assert_same_bits(seen.pulled[number + 1], seen.own[number, 1])
    for number in (0, 1):
        assert_same_bits(seen.pulled[number + 1], seen.own[number, 0])
    end = net()
    kvps.torch.load(job, end)
    assert_same_bits(buffers_of(end), seen.own[4, 1])
    assert proved(job, tmp_path).by == "recorded"


@pytest.mark.parametrize("kind", BUFFER_KINDS)
def test_a_checkpoint_has_them(store: Store, tmp_path: Path, kind: str) -> None:
    """A restored job, in other shards, ends with the bits of one that was never stopped."""
    whole = create(store, net(), kind, "whole", optimizer=RECIPE, workers=1)
    train(whole, 6, one_round)
    job = create(store, net(), kind, optimizer=RECIPE, workers=1)
    with aggregating(job):
        worker = kvps.torch.join(job, model := net(), "w0")
        while worker.session.round < 3:
            one_round(worker, model)
        worker.leave(finished=False)
        await_version(job, 3)
    job.checkpoint().write(tmp_path / "c.safetensors")
    restored = store.restore_job(Checkpoint.load(tmp_path / "c.safetensors"), "again", 4)
    assert restored.layout.buffer_kind == kind
    train(restored, 6, one_round)
    assert_same_bits(restored.snapshot()[1], whole.snapshot()[1])


# -- how a worker trains --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", BUFFER_KINDS)
@pytest.mark.slow
def test_local_steps_push_those_after_the_last_step(store: Store, kind: str) -> None:
    """As a plain loop makes them that averages after each three steps."""
    job = create(store, net(), kind, optimizer=kvps.SGD(lr=1.0))

    def run(number: int) -> None:
        model = net()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        with kvps.torch.join(job, model, f"w{number}", inner=inner, local_steps=3) as worker:
            together.wait(120)
            for each in range(6):
                worker.pull()
                loss_of(model, number, each).backward()
                worker.step()

    together = threading.Barrier(2)
    run_workers(job, partial(run, 0), partial(run, 1))
    models = [net(), net()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for each in range(6):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            loss_of(model, rank, each).backward()
            optimizer.step()
        if each % 3 == 2:
            both = [buffers_of(model) for model in models]
            found = both[0] if kind == "rank0" else mean(both, [1, 1])
            with torch.no_grad():
                for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
                    ours.copy_((ours + theirs) / 2)
                    theirs.copy_(ours)
                for model in models:
                    for name, array in found.items():
                        model.get_buffer(name).copy_(torch.tensor(array))
    end = net()
    assert kvps.torch.load(job, end) == 2
    for name, array in buffers_of(models[0]).items():
        np.testing.assert_allclose(buffers_of(end)[name], array, rtol=1e-5, atol=1e-6)
    for name, array in weights_of(models[0]).items():
        np.testing.assert_allclose(weights_of(end)[name], array, rtol=0, atol=1e-6)


def test_a_model_in_a_short_dtype(store: Store) -> None:
    """The job has the mean in float32; each worker has it rounded."""
    dtype = torch.bfloat16
    job, model = create(store, net().to(dtype), "average", workers=1), net().to(dtype)
    with aggregating(job), kvps.torch.join(job, model, "w0") as worker:
        for _ in range(3):
            worker.pull()
            x, y = batch(0, worker.session.round)
            nn.functional.cross_entropy(model(x.to(dtype)).float(), y).backward()
            own = buffers_of(model)
            worker.step()
        worker.pull()
        assert model.get_buffer(NAMES[0]).dtype == dtype
        assert_same_bits(buffers_of(model), own)
        assert_same_bits({name: job.snapshot()[1][name] for name in NAMES}, own)


# -- NaN ------------------------------------------------------------------------------------------------------------


def test_nan_in_a_buffer_is_as_nan_in_a_gradient(store: Store) -> None:
    model = net()
    job = create(store, model, "average", workers=1)
    with aggregating(job), kvps.torch.join(job, model, "w0") as worker:
        worker.pull()
        loss_of(model, 0, 0).backward()
        model[1].running_var[3] = torch.nan
        with pytest.raises(kvps.NotFinite, match=r"buffer '1.running_var' holds NaN or Inf and was not sent: mend it"):
            worker.step()
        worker.pull()
        assert model[1].running_var.isfinite().all()
        loss_of(model, 0, 0).backward()
        assert worker.step() == 1


@pytest.mark.parametrize("kind", BUFFER_KINDS)
def test_a_contribution_that_is_skipped_brings_none(store: Store, kind: str) -> None:
    """Its worker is rank 0. In the second round no worker brings any, and they stay."""
    job, first, second = create(store, net(), kind, nonfinite="skip"), net(), net()
    with aggregating(job), kvps.torch.join(job, first, "w0") as w0, kvps.torch.join(job, second, "w1") as w1:
        for spoilt in (1, 2):
            for worker, model in ((w0, first), (w1, second)):
                worker.pull()
                loss_of(model, worker.session.rank, spoilt).backward()
                if worker.session.rank < spoilt:
                    model[1].running_mean[0] = torch.inf
                if spoilt == 1:
                    own = buffers_of(model)  # those of w1 in the end
                worker.step()
        for worker, model in ((w0, first), (w1, second)):
            worker.pull()
            assert_same_bits(buffers_of(model), own)


# -- what a model may have ------------------------------------------------------------------------------------------


class Various(nn.Module):
    """Buffers of all sorts; two names for one, a module that is there twice, and one that each forward replaces."""

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.line = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)
        self.again = self.norm
        self.register_buffer("ema", torch.full((), value))
        self.register_buffer("tied", self.ema)
        self.register_buffer("steps", torch.tensor(int(value)))
        self.register_buffer("mask", torch.full((2,), -torch.inf), persistent=False)
        self.register_buffer("none", None)
        self.register_buffer("phase", torch.zeros(2, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.ema = 0.5 * self.ema + 1
        return self.again(self.norm(self.line(x))) + self.mask.exp()


def test_floats_that_are_saved_are_in_the_job_once(store: Store) -> None:
    model = Various(6.0)
    job = create(store, model, "rank0", workers=1)
    assert [p.name for p in job.layout.parameters if p.buffer] == ["ema", "norm.running_mean", "norm.running_var"]
    model = Various(3.0)
    with aggregating(job), kvps.torch.join(job, model, "w0") as worker:
        worker.pull()
        assert (model.ema.item(), model.steps.item(), model.norm.num_batches_tracked.item()) == (6, 3, 0)
        model(torch.randn(4, 2)).sum().backward()
        own = model.norm.running_mean.clone()
        worker.step()
        worker.pull()
        assert model.ema.item() == 4
        assert torch.equal(model.norm.running_mean, own)
    end = Various()
    kvps.torch.load(job, end)
    assert (end.ema.item(), end.steps.item(), end.norm.num_batches_tracked.item()) == (4, 0, 0)
    assert (model.norm.num_batches_tracked.item(), torch.isinf(model.mask).all().item()) == (2, True)


def test_own_are_in_no_job(store: Store) -> None:
    job = create(store, net(), "own")
    assert job.layout.buffer_kind == ""
    assert list(job.snapshot()[1]) == [name for name, _ in net().named_parameters()]
    assert kvps.torch.parameters(net()).keys() == kvps.torch.parameters(net(), buffers="own").keys()


def spoilt(name: str, tensor: torch.Tensor) -> nn.Module:
    model = net()
    model.register_buffer(name, tensor)
    return model


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (spoilt("a", torch.zeros(2).double()), r"buffer 'a' is float64: a job's weights are float32, .* model\.float"),
        (spoilt("a", torch.zeros(2, device="meta")), "buffer 'a' is on the device meta"),
        (spoilt("a", torch.zeros(1).expand(3)), r"buffer 'a' is expanded, .*: register its \.contiguous\(\)"),
        (spoilt("a", torch.zeros(3).to_sparse()), "buffer 'a' is sparse"),
    ],
    ids=["float64", "meta", "expanded", "sparse"],
)
def test_buffers_that_are_refused(store: Store, model: nn.Module, said: str) -> None:
    """In one line. As a worker's own they are no matter."""
    with pytest.raises(kvps.LayoutMismatch, match=said) as error:
        create(store, model, "average")
    assert "\n" not in str(error.value)
    assert store.jobs() == []
    assert create(store, model, "own").layout.buffer_kind == ""


@pytest.mark.parametrize("word", ["", "Average", ["average"]])
def test_other_words_are_refused(word: Any) -> None:
    with pytest.raises(kvps.InvalidSetting, match=r"^buffers must be one of own, average, rank0, not ") as error:
        kvps.torch.parameters(net(), buffers=word)
    assert "\n" not in str(error.value)


def test_a_model_with_other_buffers_is_refused_before_it_joins(store: Store) -> None:
    job = create(store, net(), "average")
    other = net()
    other[1] = nn.BatchNorm1d(32, track_running_stats=False)
    for call in (lambda m: kvps.torch.join(job, m, "w0"), lambda m: kvps.torch.load(job, m)):
        with pytest.raises(kvps.LayoutMismatch, match=r"not fit the job: .* 1.running_mean, 1.running_var"):
            call(other)
        with pytest.raises(kvps.LayoutMismatch, match=r"not fit the job: (unknown|the job lacks) a"):
            call(spoilt("a", torch.zeros(2)))
    assert not job.state().members


def test_a_buffer_that_is_removed_while_it_trains_is_refused(store: Store) -> None:
    model = net()
    job = create(store, model, "average", workers=1)
    with kvps.torch.join(job, model, "w0") as worker:
        worker.pull()
        loss_of(model, 0, 0).backward()
        kept, model[1].running_mean = model[1].running_mean, None
        with pytest.raises(kvps.LayoutMismatch, match=r"no longer has the buffer '1.running_mean', .*: put it back"):
            worker.step()
        model[1].running_mean = kept
        assert worker.step() == 1


# -- what docs/torch.md says to do, done by its own code -------------------------------------------------------------


def of_page(word: str) -> str:
    """The Python block of the page that has this word; it is within a list there."""
    (block,) = [each for each in python_in("docs/torch.md") if word in each]
    return textwrap.dedent(block)


def test_the_job_has_the_average_of_the_workers_buffers(store: Store) -> None:
    model = net()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    exec(of_page('buffers="average"'), found := {"kvps": kvps, "store": store, "model": model, "sgd": sgd})
    assert found["job"].layout.buffer_kind == "average"


@pytest.mark.slow
def test_statistics_of_the_final_weights_are_those_of_any_worker(store: Store) -> None:
    """Whatever a worker's buffers were, the new ones follow from the weights and the batches alone."""
    model = net()
    job = store.create_job("job", kvps.torch.parameters(model), workers=1)
    batches = [batch(9, round_) for round_ in range(5)]
    models = [net(), net()]
    models[1](3 * batch(0, 0)[0])
    assert not torch.equal(*(m.get_buffer(NAMES[0]) for m in models))
    for each in models:
        exec(of_page("update_bn"), {"torch": torch, "kvps": kvps, "job": job, "model": each, "batches": batches})
    hidden = torch.stack([model[0](x) for x, _ in batches]).detach()
    for each in models:
        torch.testing.assert_close(each.get_buffer(NAMES[0]), hidden.mean((0, 1)))
        torch.testing.assert_close(each.get_buffer(NAMES[1]), hidden.var(1).mean(0))


def test_buffers_that_the_job_does_not_have_are_one_warning(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    """A fresh BatchNorm with trained weights evaluates as no worker does."""
    own = store.create_job("own", kvps.torch.parameters(net()), workers=1)
    fresh, worked, plain = net(), net(), nn.Linear(2, 2)
    for _ in range(2):
        kvps.torch.load(own, fresh)
    assert caplog.messages == [next(iter(caplog.messages))]
    assert caplog.messages[0].startswith("the model's buffers (1.running_mean, 1.running_var) are not in job 'own': ")
    caplog.clear()
    with kvps.torch.join(own, worked) as worker:
        kvps.torch.load(own, worked)
        worker.leave(finished=False)
    averaged = store.create_job("averaged", kvps.torch.parameters(net(), buffers="average"), workers=1)
    kvps.torch.load(averaged, net())
    without = store.create_job("without", kvps.torch.parameters(plain), workers=1)
    kvps.torch.load(without, plain)
    assert caplog.messages == []
