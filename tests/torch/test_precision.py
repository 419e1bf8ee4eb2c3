"""Models in bfloat16 and float16: the job holds float32 weights, and a model computes with these, rounded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from helpers.ddp import batch, net
from helpers.digits_job import run_workers
from helpers.harness import aggregating, check_chain
from torch import nn

import kvps
import kvps.torch
from kvps.store import Store

ROUNDS, WORKERS = 6, 2


def in_bf16() -> nn.Sequential:
    return net().bfloat16()


def in_half() -> nn.Sequential:
    return net().half()


def mixed() -> nn.Sequential:
    """The norm in float32, between layers of less, as mixed models have it."""
    model = net().bfloat16()
    model[1].float()
    model[3].half()
    return model


def loss_of(model: nn.Module, rank: int, round_: int) -> torch.Tensor:
    x, y = batch(rank, round_)
    for layer in model:
        x = layer(x.to(next(layer.parameters(), x).dtype))
    return torch.nn.functional.cross_entropy(x.float(), y)


def masters_of(make: Callable[[], nn.Sequential]) -> dict[str, torch.Tensor]:
    """Float32 masters by hand: each round rounds them into two models, and steps on their gradients' mean.

    The factors are powers of two, so that PyTorch rounds as often as kvps does.
    """
    masters = [nn.Parameter(p.detach().float()) for p in make().parameters()]
    sgd = torch.optim.SGD(masters, lr=2**-3, momentum=0.5)
    models = [make() for _ in range(WORKERS)]
    for round_ in range(ROUNDS):
        for rank, model in enumerate(models):
            model.zero_grad()
            with torch.no_grad():
                for parameter, master in zip(model.parameters(), masters, strict=True):
                    parameter.copy_(master)
            loss_of(model, rank, round_).backward()
        for master, *parameters in zip(masters, *(model.parameters() for model in models), strict=True):
            master.grad = sum(p.grad.float() for p in parameters) / WORKERS
        sgd.step()
    return {name: master.detach() for (name, _), master in zip(make().named_parameters(), masters, strict=True)}


def trained(store: Store, make: Callable[[], nn.Sequential], overlap: bool = False, **settings: Any) -> kvps.Job:
    model = make()
    sgd = kvps.torch.optimizer(model, torch.optim.SGD(model.parameters(), lr=2**-3, momentum=0.5))
    settings = {"transport": "redis", "worker_timeout_ms": 60_000} | settings
    job = store.create_job("job", kvps.torch.parameters(model), optimizer=sgd, workers=WORKERS, **settings)

    def run(rank: int) -> None:
        model = make()
        with kvps.torch.join(job, model, f"w{rank}", overlap=overlap) as worker:
            while worker.session.round < ROUNDS:
                worker.pull()
                loss = loss_of(model, worker.session.rank, worker.session.round)
                loss.backward()
                worker.step(loss)

    run_workers(job, *(partial(run, rank) for rank in range(WORKERS)))
    assert check_chain(job) == ROUNDS
    return job


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        pytest.param(in_bf16, {"shards": 2}, marks=pytest.mark.slow),
        (in_bf16, {"overlap": True}),
        (in_bf16, {"gradient_format": "bf16", "weight_format": "bf16"}),
        (in_bf16, {"transport": "shm"}),
        (in_half, {}),
        (in_half, {"gradient_format": "fp16"}),
        (mixed, {}),
    ],
)
def test_a_model_of_less_precision_trains_as_with_masters_by_hand(
    store: Store, make: Callable[[], nn.Sequential], settings: dict[str, Any]
) -> None:
    """The same bits, also where gradients and weights are sent in the model's own format: nothing is left out."""
    job = trained(store, make, **settings)
    masters = masters_of(make)
    for name, array in job.snapshot()[1].items():
        np.testing.assert_array_equal(array, masters[name].numpy(), name)
    model = make()
    kvps.torch.load(job, model)
    for name, parameter in model.named_parameters():
        assert parameter.dtype == make().get_parameter(name).dtype
        assert torch.equal(parameter, masters[name].to(parameter.dtype)), name


def test_steps_too_small_for_bf16_add_up_in_the_masters(store: Store) -> None:
    """Below 1, numbers in bfloat16 are 2^-8 apart: a step of 2^-10 changes nothing, and the third of them does."""
    model = nn.Linear(1, 1, bias=False).bfloat16()
    nn.init.ones_(model.weight)
    sgd = kvps.torch.optimizer(model, torch.optim.SGD(model.parameters(), lr=2**-10))
    job = store.create_job("job", kvps.torch.parameters(model), optimizer=sgd, transport="redis")
    with aggregating(job), kvps.torch.join(job, model) as worker:
        seen = []
        for _ in range(5):
            worker.pull()
            seen.append(model.weight.item())
            model(torch.ones(1, 1, dtype=torch.bfloat16)).sum().backward()
            worker.step()
    assert seen == [1.0, 1.0, 1.0, 0.99609375, 0.99609375]


def test_the_first_weights_are_the_models_own_and_float32() -> None:
    model = in_bf16()
    start = kvps.torch.parameters(model)
    assert {tensor.dtype for tensor in start.values()} == {torch.float32}
    assert all(torch.equal(tensor.bfloat16(), model.get_parameter(name)) for name, tensor in start.items())
    plain = net()
    assert kvps.torch.parameters(plain)["0.weight"].data_ptr() == plain[0].weight.data_ptr(), "float32 is not copied"


def test_a_gradient_that_overflows_half_is_refused(store: Store) -> None:
    model = nn.Linear(1, 1, bias=False).half()
    job = store.create_job("job", kvps.torch.parameters(model), workers=1)
    with kvps.torch.join(job, model, "w0") as worker:
        worker.pull()
        (model(torch.ones(1, 1, dtype=torch.half)).float().sum() * 1e6).backward()
        with pytest.raises(kvps.NotFinite, match="'weight' holds NaN or Inf"):
            worker.step()
