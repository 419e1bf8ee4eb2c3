"""Small parameters and buffers of a model: all are copied together, wherever they are, to the same bits."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from helpers.harness import aggregating
from helpers.waiting import eventually
from torch import nn

import kvps
import kvps.torch
from kvps.arrays.layout import Layout
from kvps.store import Store
from kvps.torch.flat_tensors import FlatTensors


class Mixed(nn.Module):
    """Small and large parameters, of several shapes and dtypes, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        shapes = [(3,)] * 9 + [(2, 3), (), (4,), (80, 80), (2, 2), (5,), (1, 3)]
        self.all = nn.ParameterList(torch.randn(shape) for shape in shapes)
        self.short = nn.Parameter(torch.randn(6, dtype=torch.bfloat16))
        self.norm = nn.BatchNorm1d(3)


def test_each_parameter_moves_by_its_own_gradient(store: Store, transport: str) -> None:
    torch.manual_seed(1)
    model = Mixed()
    before = {name: p.detach().float().clone() for name, p in model.named_parameters()}
    job = store.create_job(
        "job",
        kvps.torch.parameters(model, buffers="average"),
        workers=1,
        transport=transport,
        optimizer=kvps.SGD(lr=1.0),
    )
    expected = {}
    with aggregating(job), kvps.torch.join(job, model, "w0") as worker:
        worker.pull()
        for name, p in model.named_parameters():
            p.grad = torch.randn(p.shape).to(p.dtype)
            expected[name] = before[name] - p.grad.float()
        model.all[3].grad = None
        expected["all.3"] = before["all.3"]
        model.norm.running_mean.add_(7)
        worker.step()
        worker.pull()
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.detach(), expected[name].to(p.dtype), rtol=0, atol=0, msg=name)
        assert model.norm.running_mean.tolist() == [7, 7, 7]


def test_many_small_parameters_cost_no_call_each(store: Store) -> None:
    """A pull and a step of 2,000 parameters: less than one function of Python for each."""
    model = nn.Module()
    model.all = nn.ParameterList(torch.zeros(shape) for shape in [(2,), (2, 3)] for _ in range(1_000))
    job = store.create_job("job", kvps.torch.parameters(model), workers=1)
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    with aggregating(job), kvps.torch.join(job, model, "w0") as worker:
        for round_ in range(2):
            assert eventually(lambda done=round_: job.state().version == done)
            calls = 0
            sys.setprofile(count)
            worker.pull()
            sys.setprofile(None)
            pulled = calls
            for p in model.all:
                p.grad = torch.ones_like(p)
            calls = 0
            sys.setprofile(count)
            worker.step()
            sys.setprofile(None)
    assert max(pulled, calls) < 2_000, (pulled, calls)


def test_a_model_that_has_other_memory_is_filled_there(store: Store) -> None:
    """Another program's `data`, another dtype: each pull finds where the parameters are."""
    model = nn.Module()
    model.all = nn.ParameterList(torch.zeros(3) for _ in range(20))
    job = store.create_job("job", kvps.torch.parameters(model), workers=1, optimizer=kvps.SGD(lr=1.0))
    with aggregating(job), kvps.torch.join(job, model, "w0") as worker:
        for round_, change in enumerate(("nothing", "data", "half", "float")):
            worker.pull()
            assert {value for p in model.all for value in p.tolist()} == {-float(round_)}, change
            if change == "data":
                model.all[5].data = model.all[5].data.clone()
            elif change != "nothing":
                getattr(model, change)()
            for p in model.all:
                p.grad = torch.ones_like(p)
            worker.step()


def test_a_backward_through_weights_of_an_earlier_pull_is_refused(store: Store) -> None:
    model = nn.Module()
    model.all = nn.ParameterList(torch.ones(3) for _ in range(20))
    job = store.create_job("job", kvps.torch.parameters(model), workers=1, staleness=1)
    with aggregating(job), kvps.torch.join(job, model, "w0") as worker:
        worker.pull()
        loss = sum((p * p).sum() for p in model.all)
        worker.pull()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_device_without_page_locked_memory() -> None:
    """As a Mac's. The device meta stands for it: it is not the CPU, and memory cannot be page-locked for it."""
    layout = Layout.of({f"{number:02}": np.zeros(3, np.float32) for number in range(20)})
    tensors = {name: torch.empty(3, device="meta") for name in layout.numbers}
    FlatTensors(tensors, layout).fill(tensors, np.ones(layout.size, np.float32))
