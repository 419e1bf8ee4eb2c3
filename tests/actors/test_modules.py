"""Modules of PyTorch are published and watched in place, whatever their dtypes, ties and devices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvps.errors import LayoutMismatch
from kvps.store import Store


class Tied(torch.nn.Module):
    """A small language model whose head is its embedding, with a buffer."""

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = torch.nn.Embedding(20, 6)
        self.norm = torch.nn.BatchNorm1d(6)
        self.head = torch.nn.Linear(6, 20, bias=False)
        self.head.weight = self.embed.weight
        self.to(dtype)


def bits(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(one: torch.nn.Module, other: dict[str, torch.Tensor]) -> bool:
    state = one.state_dict()
    return state.keys() == other.keys() and all(torch.equal(state[name], tensor) for name, tensor in other.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_module_is_brought_to_each_version_in_place(store: Store, dtype: torch.dtype) -> None:
    learner, actor = Tied(dtype, 1), Tied(dtype, 2)
    optimizer = torch.optim.SGD(learner.parameters(), lr=0.1)
    held = actor.embed.weight
    with store.publisher("policy", learner) as policy, store.watch("policy") as watch:
        watch.load(actor)
        assert same(actor, bits(learner))
        for step in range(1, 4):
            optimizer.zero_grad()
            learner.head(learner.norm(learner.embed(torch.arange(8)))).float().square().mean().backward()
            optimizer.step()
            policy.publish(learner, loss=torch.tensor(0.5))
            assert watch.update(actor) == step
            assert same(actor, bits(learner))
    assert actor.embed.weight is held
    assert actor.head.weight is held
    assert actor.embed.weight.requires_grad
    assert policy.job.layout.tied == {"head.weight": "embed.weight"}


def test_masters_are_published_in_bfloat16(store: Store) -> None:
    learner, half, full = Tied(torch.float32, 1), Tied(torch.bfloat16, 2), Tied(torch.float32, 3)
    with store.publisher("policy", learner, dtype="bf16") as policy, store.watch("policy") as watch:
        with torch.no_grad():
            learner.embed.weight.mul_(1.01)
        policy.publish(learner)
        wanted = bits(learner.to(torch.bfloat16))
        watch.load(half)
        assert same(half, wanted)
        watch.load(full)
        assert same(full, {name: tensor.to(full.state_dict()[name].dtype) for name, tensor in wanted.items()})
        assert policy.job.layout.nbytes < sum(tensor.nbytes for tensor in full.state_dict().values()) / 1.5
        with pytest.raises(LayoutMismatch, match="bfloat16 now, and was float32"):
            policy.publish(learner)


class Copied(Tied):
    """As those are whose arrays are on several devices: its state dict is made for the call."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {name: tensor.clone() for name, tensor in super().state_dict(*args, **kwargs).items()}


def test_a_state_dict_of_copies_is_not_written_to_in_vain(store: Store) -> None:
    learner, actor = Tied(torch.float32, 1), Copied(torch.float32, 2)
    before = bits(actor)
    with store.publisher("policy", learner), store.watch("policy") as watch:
        with pytest.raises(LayoutMismatch, match=r"is a copy, .* model.load_state_dict\(state\) after"):
            watch.load(actor)
        assert same(actor, before)
        state = actor.state_dict()
        watch.load(state)
        actor.load_state_dict(state)
        assert same(actor, bits(learner))


def test_a_job_that_workers_train_is_watched_too(store: Store) -> None:
    params = {"w": np.ones((3, 2), np.float32)}
    job = store.create_job("trained", params)
    model = {"w": torch.zeros(3, 2)}
    with store.watch("trained") as watch:
        assert watch.load(model) == 0
        assert torch.equal(model["w"], torch.ones(3, 2))
        assert (watch.running, watch.traffic.differences) == (True, 0)
        assert job.state().active == 0
