"""The buffers of a model that several workers train: what docs/torch.md says to do, done by its own code."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from helpers.ddp import batch, net
from helpers.harness import aggregating
from helpers.pages import python_in
from torch import nn

import kvps
import kvps.torch
from kvps.store import Store

WORKERS = 3
BUFFERS = ("1.running_mean", "1.running_var")


def of_page(word: str) -> str:
    """The Python block of the page that has this word; it is within a list there."""
    (block,) = [each for each in python_in("docs/torch.md") if word in each]
    return textwrap.dedent(block)


def after_own_batches(rank: int) -> nn.Sequential:
    model = net().train()
    for round_ in range(3):
        model(batch(rank, round_)[0] * (rank + 1) + rank)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_average_of_the_workers_buffers(store: Store, dtype: torch.dtype) -> None:
    """In the order of ranks, as a job reduces; integer buffers and parameters stay a worker's own."""
    models = [after_own_batches(rank).to(dtype) for rank in range(WORKERS)]
    for rank, model in enumerate(models):
        model.register_buffer("scale", torch.tensor(rank, dtype=dtype))
        model[1].num_batches_tracked.fill_(rank)
    want = {name: sum(m.get_buffer(name).float() for m in models) / WORKERS for name in (*BUFFERS, "scale")}
    weights = [[p.clone() for p in model.parameters()] for model in models]
    exec(of_page("def average"), found := {"torch": torch})
    buffers_of: Callable[[Any], dict[str, torch.Tensor]] = found["buffers_of"]
    start = buffers_of(after_own_batches(0).to(dtype)) | {"scale": torch.tensor(5.0)}
    job = store.create_job("buffers", start, optimizer=kvps.SGD(lr=1.0), workers=WORKERS)
    with aggregating(job), ThreadPoolExecutor(WORKERS) as pool:
        for end in [pool.submit(found["average"], job, model, f"w{n}") for n, model in enumerate(models)]:
            end.result()
        found["average"](job, models[0], "w0")  # a worker that was started again changes nothing
    assert job.state().version == 1
    for rank, model in enumerate(models):
        for name, mean in want.items():
            torch.testing.assert_close(model.get_buffer(name), mean.to(dtype), msg=name)
        assert model[1].num_batches_tracked == rank
        assert all(map(torch.equal, model.parameters(), weights[rank]))


def test_an_average_that_a_worker_has_left_is_refused(store: Store) -> None:
    exec(of_page("def average"), found := {"torch": torch})
    model = after_own_batches(1)
    own = [model.get_buffer(name).clone() for name in BUFFERS]
    start = found["buffers_of"](net())
    job = store.create_job("buffers", start, optimizer=kvps.SGD(lr=1.0), workers=2, worker_timeout_ms=1000)
    job.join("w1").leave(finished=False)
    with aggregating(job), pytest.raises(RuntimeError, match="a worker has left"):
        found["average"](job, model, "w0")
    assert all(torch.equal(model.get_buffer(name), before) for name, before in zip(BUFFERS, own, strict=True))


def test_statistics_of_the_final_weights_are_those_of_any_worker(store: Store) -> None:
    """Whatever a worker's buffers were, the new ones follow from the weights and the batches alone."""
    model = net()
    job = store.create_job("job", kvps.torch.parameters(model), workers=1)
    batches = [batch(9, round_) for round_ in range(5)]
    models = [after_own_batches(rank) for rank in range(2)]
    assert not torch.equal(*(m.get_buffer(BUFFERS[0]) for m in models))
    for each in models:
        exec(of_page("update_bn"), {"torch": torch, "kvps": kvps, "job": job, "model": each, "batches": batches})
    hidden = torch.stack([model[0](x) for x, _ in batches]).detach()
    for each in models:
        torch.testing.assert_close(each.get_buffer(BUFFERS[0]), hidden.mean((0, 1)))
        torch.testing.assert_close(each.get_buffer(BUFFERS[1]), hidden.var(1).mean(0))


def test_rank_0_evaluates_with_statistics_of_its_own(store: Store) -> None:
    job = store.create_job("job", kvps.torch.parameters(net()), workers=1)
    model = after_own_batches(0)
    own = [model.get_buffer(name).clone() for name in BUFFERS]
    kvps.torch.load(job, model)
    assert all(torch.equal(model.get_buffer(name), before) for name, before in zip(BUFFERS, own, strict=True))
