"""A worker whose model no longer trains what its job has is told so at its next pull or step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers.harness import aggregating
from torch import nn

import kvps
import kvps.torch
from kvps.store import Store


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(2, 2)
        self.body.bias.requires_grad_(False)
        self.act = nn.ReLU()
        self.head = nn.Linear(2, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.act(self.body(x)))


def unfreeze(model: Model) -> None:
    model.body.bias.requires_grad_(True)


def assign(model: Model) -> None:
    model.load_state_dict(Model().state_dict(), assign=True)


def replace(model: Model) -> None:
    model.head = nn.Linear(2, 2, bias=False)


def tie(model: Model) -> None:
    model.head.weight = model.body.weight


def add(model: Model) -> None:
    model.adapter = nn.Linear(2, 1)


def add_to_a_leaf(model: Model) -> None:
    model.act.slope = nn.Parameter(torch.ones(1))


def remove(model: Model) -> None:
    del model.head.weight


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (unfreeze, "unfrozen after join, and not in the job: body.bias; unfreeze before create_job, or freeze again"),
        (assign, "replaced after join, .*: body.weight, head.weight; copy into that one, as load_state_dict does with"),
        (replace, "replaced after join, and the job trains the parameter before: head.weight; copy into that one"),
        (tie, "tied after join to another parameter, and the job has both: head.weight; tie them before create_job"),
        (add, "new since join, and not in the job: adapter.weight, adapter.bias; add it before create_job"),
        (add_to_a_leaf, "new since join, and not in the job: act.slope; add it before create_job"),
        (remove, "trained by the job, and no longer in the model: head.weight; put it back"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_model_that_was_changed_after_join_is_refused(
    store: Store, change: Callable[[Model], None], said: str
) -> None:
    model = Model()
    job = store.create_job("job", kvps.torch.parameters(model))
    worker = kvps.torch.join(job, model, "w0")
    worker.pull()
    model(torch.ones(1, 2)).sum().backward()
    change(model)
    for call in (worker.step, worker.pull):
        with pytest.raises(kvps.LayoutMismatch, match=said):
            call()
    worker.leave(finished=False)


def test_what_does_not_change_what_is_trained_is_accepted(store: Store) -> None:
    model = Model()
    job = store.create_job("job", kvps.torch.parameters(model))
    with aggregating(job), kvps.torch.join(job, model, "w0") as worker:
        worker.pull()
        model.drop = nn.Dropout()
        model.act = nn.Tanh()
        model.body.extra = nn.Parameter(torch.ones(1), requires_grad=False)
        worker.pull()
        model.load_state_dict(model.state_dict())
        model(torch.ones(1, 2)).sum().backward()
        assert worker.step() == 1
        worker.pull()
        model.body.extra.requires_grad_(True)
        with pytest.raises(kvps.LayoutMismatch, match=r"new since join, and not in the job: body.extra; "):
            worker.pull()
        model.body.extra.requires_grad_(False)
        model(torch.ones(1, 2)).sum().backward()
        assert worker.step() == 2
