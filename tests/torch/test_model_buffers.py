"""The buffers of a model that several workers train: what docs/torch.md says to do, done by its own code."""

from __future__ import annotations

import textwrap

import pytest
import torch
from helpers.ddp import batch, net
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


def test_the_job_has_the_average_of_the_workers_buffers(store: Store) -> None:
    """By the page. How they are averaged, see test_job_buffers.py."""
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
    models = [after_own_batches(rank) for rank in range(2)]
    assert not torch.equal(*(m.get_buffer(BUFFERS[0]) for m in models))
    for each in models:
        exec(of_page("update_bn"), {"torch": torch, "kvps": kvps, "job": job, "model": each, "batches": batches})
    hidden = torch.stack([model[0](x) for x, _ in batches]).detach()
    for each in models:
        torch.testing.assert_close(each.get_buffer(BUFFERS[0]), hidden.mean((0, 1)))
        torch.testing.assert_close(each.get_buffer(BUFFERS[1]), hidden.var(1).mean(0))


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
