"""The buffers of a model that several workers train: what docs/torch.md says to do, done by its own code."""

from __future__ import annotations

import textwrap
from functools import partial

import pytest
import torch
from helpers.ddp import batch, net
from helpers.digits_job import run_workers
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


@pytest.mark.slow
def test_the_average_of_the_workers_buffers(store: Store) -> None:
    """Integer buffers stay a worker's own."""
    models = [after_own_batches(rank) for rank in range(WORKERS)]
    sgd = torch.optim.SGD(models[0].parameters(), lr=0.1)
    exec(of_page('buffers="average"'), found := {"kvps": kvps, "store": store, "model": models[0], "sgd": sgd})
    job: kvps.Job = found["job"]
    want = {name: sum(m.get_buffer(name).float() for m in models[:2]) / 2 for name in BUFFERS}

    def train(number: int) -> None:
        own = [buffer.clone() for buffer in models[number].buffers()]
        with kvps.torch.join(job, models[number], f"w{number}") as worker:
            worker.pull()
            sum(p.sum() for p in models[number].parameters()).backward()  # type: ignore[union-attr]
            for buffer, before in zip(models[number].buffers(), own, strict=True):
                buffer.copy_(before)
            worker.step()

    run_workers(job, partial(train, 0), partial(train, 1))
    models[2][1].num_batches_tracked.fill_(7)
    kvps.torch.load(job, models[2])
    for name, mean in want.items():
        torch.testing.assert_close(models[2].get_buffer(name), mean, msg=name)
    assert models[2][1].num_batches_tracked == 7


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
