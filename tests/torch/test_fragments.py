"""Local steps that synchronize fragments of the model in turn (Streaming DiLoCo), against a loop in PyTorch alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.arrays import assert_same_bits
from helpers.ddp import loss_of, net, train_on, weights_of
from helpers.digits_job import proved
from helpers.faults import full_server
from helpers.harness import aggregating, await_version, check_chain
from torch import nn

import kvps
import kvps.torch
from kvps.arrays.parts import fragment_of
from kvps.store import Store

STEPS, FRAGMENTS = 4, 2
OUTER = {"lr": 0.7, "momentum": 0.9, "nesterov": True}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)


def create(store: Store, **settings: Any) -> kvps.Job:
    settings = {"workers": 2, "transport": "redis", "local_steps": STEPS, "fragments": FRAGMENTS} | settings
    return store.create_job("job", kvps.torch.parameters(net()), optimizer=kvps.SGD(**OUTER), **settings)


class Plain:
    """The algorithm in one process: after every STEPS / FRAGMENTS steps one fragment is averaged and stepped."""

    def __init__(self, part_of: dict[str, str], workers: int) -> None:
        self.main, self.replicas = net(), [net() for _ in range(workers)]
        self.inners = [sgd(replica) for replica in self.replicas]
        self.outers = {
            part: torch.optim.SGD([p for n, p in self.main.named_parameters() if part_of[n] == part], **OUTER)
            for part in part_of.values()
        }
        self._part_of = part_of

    def train(self, batches: range) -> None:
        for rank, (replica, inner) in enumerate(zip(self.replicas, self.inners, strict=True)):
            for number in batches:
                inner.zero_grad()
                loss_of(replica, rank, number).backward()
                inner.step()

    def synchronize(self, parts: list[str]) -> None:
        with torch.no_grad():
            for name, parameter in self.main.named_parameters():
                mine = [dict(replica.named_parameters())[name] for replica in self.replicas]
                parameter.grad = torch.stack([parameter - each for each in mine]).mean(0)
        for part in parts:
            self.outers[part].step()
        with torch.no_grad():
            for name, parameter in self.main.named_parameters():
                for replica in self.replicas:
                    if self._part_of[name] in parts:
                        dict(replica.named_parameters())[name].copy_(parameter)


@pytest.mark.slow
def test_streaming_diloco_is_the_loop_of_its_paper(store: Store, tmp_path: Path, transport: str) -> None:
    """Fragments in turn; the last steps are of the whole model, so that no worker's steps are lost."""
    job, models = create(store, transport=transport), [net(), net()]
    plain = Plain({p.name: p.part for p in job.layout.parameters}, 2)
    every, rounds = STEPS // FRAGMENTS, 5
    with aggregating(job, record=tmp_path):
        workers = [kvps.torch.join(job, model, f"w{n}", inner=sgd(model)) for n, model in enumerate(models)]
        for number in range(rounds * every + 1):
            for worker, model in zip(workers, models, strict=True):
                train_on(worker, model, number)
        for round_ in range(rounds):
            plain.train(range(round_ * every, (round_ + 1) * every))
            plain.synchronize([fragment_of(round_, FRAGMENTS)])
        plain.train(range(rounds * every, rounds * every + 1))
        plain.synchronize(list(plain.outers))
        for worker in workers:
            worker.leave()
        await_version(job, rounds + 1)
    end = net()
    assert kvps.torch.load(job, end) == check_chain(job) == rounds + 1
    parts = [[c.part for c in commit.plan.contributions] for commit in job.log()]
    assert parts == [[part] * 2 for part in ("0", "1", "0", "1", "0", "")]
    ends, wanted = weights_of(end), weights_of(plain.main)
    for name in wanted:
        np.testing.assert_allclose(ends[name], wanted[name], rtol=0, atol=1e-5 * np.abs(wanted[name]).max())
    assert proved(job, tmp_path).replayed == rounds + 1


def test_a_worker_that_comes_back_goes_on_with_the_fragment_whose_turn_it_is(store: Store) -> None:
    job, model = create(store, workers=1), net()
    with aggregating(job):
        worker = kvps.torch.join(job, model, "w0", inner=sgd(model))
        for number in range(STEPS // FRAGMENTS):
            train_on(worker, model, number)
        worker.session.leave(finished=False)  # as a process that was killed, which pushes nothing
        again = kvps.torch.join(job, model, "w0", inner=sgd(model))
        again.pull()
        _, weights = job.snapshot()
        assert_same_bits(weights_of(model), weights)
        loss_of(model, 0, 0).backward()
        again.step()
        train_on(again, model, 1)
        again.leave()
        await_version(job, 3)
    assert [c.part for commit in job.log() for c in commit.plan.contributions] == ["0", "1", ""]


def test_a_round_that_was_given_up_begins_with_the_whole_model(store: Store) -> None:
    job, model = create(store, workers=1), net()
    with aggregating(job):
        worker = kvps.torch.join(job, model, "w0", inner=sgd(model))
        for number in range(3):
            train_on(worker, model, number)
        await_version(job, 1)
    with full_server(store), pytest.raises(kvps.ServerFull):
        train_on(worker, model, 3)
    worker.pull()
    _, weights = job.snapshot()
    assert_same_bits(weights_of(model), weights)
    worker.leave()
    assert [c.part for commit in job.log() for c in commit.plan.contributions] == ["0"]


@pytest.mark.parametrize("spoilt", [False, True])
def test_a_batch_that_is_left_out_takes_no_steps_back(store: Store, spoilt: bool) -> None:
    """A pull after a pull, as NotFinite advises, kept the job's weights of other fragments in place of the worker's."""
    job, model = create(store, workers=1), net()
    with aggregating(job):
        worker = kvps.torch.join(job, model, "w0", inner=sgd(model))
        for number in range(STEPS // FRAGMENTS):
            train_on(worker, model, number)
        worker.pull()
        own = {name: array.copy() for name, array in weights_of(model).items()}
        if spoilt:
            (loss_of(model, 0, 0) * float("nan")).backward()
            with pytest.raises(kvps.NotFinite):
                worker.step()
        worker.pull()
        assert_same_bits(weights_of(model), own)
        worker.leave()
        await_version(job, 2)
    assert [c.part for commit in job.log() for c in commit.plan.contributions] == ["0", ""]


def test_a_worker_that_leaves_pushes_the_steps_of_other_fragments_with_their_weight(store: Store) -> None:
    job, model = create(store, workers=1, reduction="weighted"), net()
    with aggregating(job):
        worker = kvps.torch.join(job, model, "w0", inner=sgd(model))
        for number in range(STEPS // FRAGMENTS):
            worker.pull()
            loss_of(model, 0, number).backward()
            worker.step(weight=64)
        worker.leave()
        await_version(job, 2)
    pushed = [(c.part, c.weight) for commit in job.log() for c in commit.plan.contributions]
    assert pushed == [("0", 128), ("", 128)]


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"local_steps": 5}, "fragments must divide local_steps"),
        ({"fragments": 4_000, "local_steps": 4_000}, "fragments must not exceed the"),
        ({"quorum": 1, "late": "drop"}, "choose late next"),
        ({"weight_format": "int8"}, "with fragments choose fp32 or bf16"),
        ({"units": 4}, "leave units or fragments out"),
    ],
)
def test_what_cannot_be_is_one_line(store: Store, settings: dict[str, Any], why: str) -> None:
    with pytest.raises(kvps.InvalidSetting, match=why):
        create(store, **settings)
    assert not list(store.jobs())
