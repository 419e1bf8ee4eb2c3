"""Weights that a script changes are the job's: the next step refuses a change, and lets go on whoever undoes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from helpers.arrays import assert_same_bits
from helpers.counting import SAMPLES, Count, Numbers, counting, once
from helpers.harness import aggregating
from helpers.waiting import eventually
from torch import nn
from torch.nn.utils import parametrizations, vector_to_parameters

import kvps
import kvps.torch
from kvps.store import Store
from kvps.torch.weight_watch import TURNS

Net = nn.Module
REFUSED = r"changed outside of step\(\), and not in the job: .*{}"


class Small(nn.Module):
    """An embedding, a layer, and a norm with buffers."""

    def __init__(self, **embedding: Any) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.words = nn.Embedding(40, 6, **embedding)
        self.norm = nn.BatchNorm1d(6)
        self.layer = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(self.norm(self.words(x)))
        return out.float()


def one_step(model: nn.Module, optimizer: Any, number: int) -> None:
    optimizer.zero_grad()
    model(torch.arange(8) + number % 8).square().mean().backward()
    optimizer.step()


@contextmanager
def training(store: Store, model: nn.Module, inner: Any = None, **settings: Any) -> Iterator[kvps.torch.Optimizer]:
    """The optimizer of the only worker of a job."""
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    start, rule = kvps.torch.parameters(model, settings.pop("buffers", "own")), kvps.torch.optimizer(model, sgd)
    job = store.create_job("job", start, optimizer=rule, workers=1, **settings)
    with aggregating(job), kvps.torch.Optimizer(sgd, model, job=job, inner=inner) as optimizer:
        yield optimizer


def clamped(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.clamp_(-0.01, 0.01)


def loaded(model: nn.Module) -> None:
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})


def through_data(model: nn.Module) -> None:
    for p in model.parameters():
        p.data.clamp_(-0.01, 0.01)


def through_numpy(model: nn.Module) -> None:
    model.get_parameter("layer.bias").detach().numpy()[-1] = 9


def other_memory(model: nn.Module) -> None:
    for p in model.parameters():
        p.data = torch.zeros_like(p)


def a_vector(model: nn.Module) -> None:
    vector_to_parameters(torch.zeros(sum(p.numel() for p in model.parameters())), model.parameters())


def rounded(model: nn.Module) -> None:
    model.half().float()


@pytest.mark.parametrize("transport", ["redis", "shm"])
def test_the_next_step_refuses_a_change_and_goes_on_once_it_is_undone(store: Store, transport: str) -> None:
    model = Small()
    with training(store, model, transport=transport) as optimizer:
        for number, change in enumerate([loaded, clamped, other_memory, a_vector, rounded]):
            before = {name: p.detach().clone() for name, p in model.named_parameters()}
            change(model)
            with pytest.raises(kvps.UsageError, match=REFUSED.format(r"words\.weight.*layer\.bias")):
                one_step(model, optimizer, number)
            with torch.no_grad():
                for name, p in model.named_parameters():
                    p.copy_(before[name])
            one_step(model, optimizer, number)
            assert optimizer.job.state().version == number + 1


@pytest.mark.parametrize("change", [through_data, through_numpy])
def test_writes_that_pytorch_does_not_count_are_found_within_64_steps(
    store: Store, change: Callable[[Net], None]
) -> None:
    """Before the first step at once; of a worker too, whose next pull would overwrite the change."""
    model = Small()

    def step_with_optimizer() -> None:
        one_step(model, optimizer, 0)
        change(model)

    def step_with_worker() -> None:
        optimizer.worker.pull()
        model(torch.arange(8)).mean().backward()
        optimizer.worker.step()
        change(model)

    def many(step: Callable[[], None]) -> None:
        for _ in range(TURNS + 1):
            step()

    refused = partial(pytest.raises, kvps.UsageError, match=REFUSED.format(r"layer\.bias"))
    with training(store, model) as optimizer:
        through_numpy(model)
        with refused():
            step_with_optimizer()
        for step in (step_with_optimizer, step_with_worker):
            kvps.torch.load(optimizer.job, model)
            with refused():
                many(step)


def test_an_embedding_that_writes_its_weight_in_forward_is_refused(store: Store) -> None:
    model = Small(max_norm=0.5)
    with (
        training(store, model) as optimizer,
        pytest.raises(kvps.UsageError, match=REFUSED.format(r"words\.weight; load")),
    ):
        one_step(model, optimizer, 0)


@contextmanager
def average_in_place(model: nn.Module) -> Iterator[None]:
    """As callbacks evaluate an average: swapped in, and then out again."""
    kept = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)
    yield
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(kept[name])


@contextmanager
def average_in_other_memory(model: nn.Module) -> Iterator[None]:
    kept = {name: p.data for name, p in model.named_parameters()}
    for p in model.parameters():
        p.data = torch.zeros_like(p)
    yield
    for name, p in model.named_parameters():
        p.data = kept[name]


def harmless(model: nn.Module, number: int) -> None:
    """Something that changes no weight, or not for long."""
    if number < 2:
        with (average_in_place, average_in_other_memory)[number](model):
            model(torch.arange(4))
    elif number == 2:
        model.to(memory_format=torch.channels_last)
    elif number == 3:
        model.load_state_dict(model.state_dict())
    elif number == 4:
        model.get_buffer("norm.running_mean").fill_(7)
    elif number == 5:
        model.get_parameter("layer.weight").data = model.get_parameter("layer.weight").detach().clone()
    else:
        with torch.no_grad():
            model.get_parameter("layer.weight").clamp_(-1e6, 1e6)


def test_what_comes_back_is_no_change(store: Store) -> None:
    ends = list[dict[str, np.ndarray]]()
    for transport, what in (("redis", lambda *_: None), ("redis", harmless), ("shm", harmless)):
        model = Small()
        with training(store, model, transport=transport) as optimizer:
            for number in range(8):
                one_step(model, optimizer, number)
                what(model, number)
            ends.append(dict(optimizer.job.snapshot()[1]))
        store.remove_job("job")
    assert_same_bits(ends[0], ends[1])
    assert_same_bits(ends[0], ends[2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_are_compared_in_the_models_own_dtype(store: Store, dtype: torch.dtype) -> None:
    """NaN too: there is nothing to compare it with."""
    model = Small()
    with training(store, model, nonfinite="skip") as optimizer:
        one_step(model, optimizer, 0)
        model.to(dtype)
        for number in range(TURNS + 1):
            one_step(model, optimizer, number)
        with torch.no_grad():
            model.layer.bias[0] += 1
        with pytest.raises(kvps.UsageError, match=REFUSED.format(r"layer\.bias; load")):
            one_step(model, optimizer, 0)


def test_parametrizations_go_on(store: Store) -> None:
    model = Small()
    parametrizations.weight_norm(model.layer)
    parametrizations.spectral_norm(model.words)
    nn.utils.parametrize.register_parametrization(model.layer, "bias", nn.Hardtanh(-0.01, 0.01))
    with training(store, model) as optimizer:
        for number in range(TURNS + 1):
            one_step(model, optimizer, number)
        assert optimizer.steps == optimizer.job.state().version == TURNS + 1
    assert model.layer.bias.abs().max() <= 0.01


@pytest.mark.parametrize("transport", ["redis", "shm"])
def test_a_change_behind_the_step_of_a_unit(store: Store, transport: str) -> None:
    """The next unit may bring its weights along, before the worker pulls. An average may be swapped in and out."""
    job = counting(store, workers=1, transport=transport)
    refused = pytest.raises(kvps.UsageError, match=REFUSED.format("done; load"))
    with aggregating(job):
        with refused, kvps.torch.join(job, model := Count(), "w0") as worker:
            for numbers in worker.batches(Numbers(SAMPLES), seed=False):
                model(numbers).backward()
                worker.step()
                clamped(model)
        with kvps.torch.join(job, model := Count(), "w0") as worker:
            for numbers in worker.batches(Numbers(SAMPLES), seed=False):
                model(numbers).backward()
                worker.step()
                with average_in_place(model):
                    pass
            clamped(model)
    once(job)


def test_weights_that_kvps_loads_are_no_change(store: Store) -> None:
    """In ASP they may be newer than those pulled. Those of another job are a change."""
    model, other = Small(), Small()
    clamped(other)
    another = store.create_job("another", kvps.torch.parameters(other))
    with training(store, model, staleness=-1) as optimizer, kvps.torch.join(optimizer.job, other, "w1") as beside:
        for number in range(4):
            beside.pull()
            other(torch.arange(8)).mean().backward()
            beside.step()
            # Not by the version: it may be made of both workers' contributions.
            assert eventually(lambda number=number: optimizer.job.state().clock["w1"] == number + 1)
            kvps.torch.load(optimizer.job, model)
            one_step(model, optimizer, number)
        kvps.torch.load(another, model)
        with pytest.raises(kvps.UsageError, match=REFUSED.format(r"words\.weight")):
            one_step(model, optimizer, 0)
        beside.leave()


def test_a_change_counts_in_a_round_of_local_steps(store: Store) -> None:
    """But it is no other start, and between a push and a pull it would be lost."""
    model = Small()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with training(store, model, inner, local_steps=3) as optimizer:
        loaded(model)
        with pytest.raises(kvps.UsageError, match=REFUSED.format(r"layer\.bias")):
            one_step(model, optimizer, 0)
        optimizer.worker.discard_changes()
        worker = optimizer.worker
        worker.pull()
        for number in range(1, 7):
            model(torch.arange(8)).mean().backward()
            worker.step()
            if number % 3:
                clamped(model)
            else:
                with average_in_place(model):
                    pass
            worker.pull()
        assert worker.session.version == 2
        for _ in range(3):
            model(torch.arange(8)).mean().backward()
            worker.step()
            clamped(model)
            if worker.session.clock < 3:
                worker.pull()
        with pytest.raises(kvps.UsageError, match=REFUSED.format(r"layer\.bias")):
            worker.pull()


def test_a_change_behind_the_last_step_is_said_at_the_end(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    model = Small()
    with training(store, model) as optimizer:
        one_step(model, optimizer, 0)
        clamped(model)
    assert "changed in the model after the last step, and the job does not have that: words.weight, " in caplog.text
