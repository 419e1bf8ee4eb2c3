"""kvps.torch.load into models that do not train: frozen, wrapped, with more or less in them. And wrapped ones join."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers.harness import aggregating
from torch import nn

import kvps
import kvps.torch
from kvps.store import Store

# torch.compile imports what warns, with PyTorch 2.13.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.policy = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        self.value = nn.Linear(4, 1)


class Policy(nn.Module):
    """The same without its value head, and with a head of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        self.temperature = nn.Parameter(torch.ones(1))


def created(store: Store, model: nn.Module, name: str = "job", buffers: str = "average") -> kvps.Job:
    return store.create_job(name, kvps.torch.parameters(model, buffers=buffers), worker_timeout_ms=60_000)


def slow(make: Callable[[], nn.Module]) -> Any:
    """What torch.compile imports takes seconds."""
    return pytest.param(make, marks=pytest.mark.slow)


def frozen(model: nn.Module) -> nn.Module:
    return model.requires_grad_(False).eval()


def under_inference() -> nn.Module:
    with torch.inference_mode():
        return ActorCritic()


@pytest.mark.parametrize(
    "make",
    [
        lambda: frozen(ActorCritic()),
        lambda: nn.DataParallel(ActorCritic()),
        slow(lambda: nn.DataParallel(torch.compile(ActorCritic()))),
        slow(lambda: torch.compile(nn.DataParallel(ActorCritic()))),
        under_inference,
    ],
    ids=["frozen", "parallel", "parallel-compiled", "compiled-parallel", "inference"],
)
def test_load_is_by_names_whatever_wraps_or_freezes_the_model(store: Store, make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(1)
    trained = ActorCritic()
    trained.policy[1].running_mean.fill_(7)
    model = make()
    loaded = kvps.torch.load(created(store, trained), model)
    assert (loaded, loaded.missing_keys, loaded.unexpected_keys) == (0, [], [])
    own = [tensor for _, tensor in model.named_parameters()] + [b for n, b in model.named_buffers() if "running" in n]
    of_job = [*trained.parameters(), *(b for n, b in trained.named_buffers() if "running" in n)]
    assert all(map(torch.equal, own, of_job))


def test_a_job_whose_names_have_a_wrapper_loads_into_the_model_itself(store: Store) -> None:
    trained = nn.DataParallel(ActorCritic())
    job = store.create_job("job", dict(trained.named_parameters()))
    assert job.layout.parameters[0].name == "module.policy.0.weight"
    model = ActorCritic()
    assert kvps.torch.load(job, model) == 0
    assert torch.equal(model.value.weight, trained.module.value.weight)
    with kvps.torch.join(job, model, "w0") as worker:  # and is trained under the job's names
        worker.pull()


def test_a_policy_without_its_value_head(store: Store) -> None:
    torch.manual_seed(2)
    trained, model = ActorCritic(), Policy()
    before = model.policy[0].weight.detach().clone()
    job = created(store, trained)
    with pytest.raises(
        kvps.LayoutMismatch,
        match=r"the job lacks temperature; the model lacks value\.weight, value\.bias: strict=False loads what both",
    ):
        kvps.torch.load(job, model)
    assert torch.equal(model.policy[0].weight, before)
    loaded = kvps.torch.load(job, model, strict=False)
    assert (loaded.missing_keys, loaded.unexpected_keys) == (["temperature"], ["value.weight", "value.bias"])
    assert torch.equal(model.policy[0].weight, trained.policy[0].weight)
    other = Policy()
    kvps.torch.load(job, other, only="policy.*")
    assert torch.equal(other.policy[0].weight, trained.policy[0].weight)
    alone = ActorCritic().policy
    kvps.torch.load(job, alone, prefix="policy.")
    assert torch.equal(alone[0].weight, trained.policy[0].weight)
    before = alone[0].bias.detach().clone()
    kvps.torch.load(job, alone, prefix="policy.", only=["*.weight"])
    for how, said in (({"only": "polcy.*"}, "only has 'polcy"), ({"prefix": "polcy."}, "begins with the prefix 'polc")):
        with pytest.raises(kvps.InvalidSetting, match=said):
            kvps.torch.load(job, model, **how)
    with pytest.raises(kvps.LayoutMismatch, match="no name is in both"):
        kvps.torch.load(job, nn.Linear(4, 3), strict=False)
    with pytest.raises(kvps.LayoutMismatch, match=r"'policy.0.weight' has shape \(3, 5\), the job's has \(3, 4\)"):
        kvps.torch.load(job, nn.ModuleDict({"policy": nn.Sequential(nn.Linear(5, 3))}), strict=False)


def test_what_is_tied_in_the_model_and_not_in_the_job_is_refused(store: Store) -> None:
    def two(tied: bool) -> nn.Module:
        model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
        if tied:
            model[1].weight = model[0].weight
        return model

    job = created(store, two(tied=False), buffers="own")
    with pytest.raises(kvps.LayoutMismatch, match=r"'0.weight' and '1.weight' are one tensor in the model"):
        kvps.torch.load(job, two(tied=True))
    tied = created(store, two(tied=True), "tied", buffers="own")
    kvps.torch.load(tied, two(tied=True))
    with pytest.raises(kvps.LayoutMismatch, match=r"the job lacks 1.weight"):
        kvps.torch.load(tied, two(tied=False))


@pytest.mark.slow
def test_a_compiled_model_trains_under_the_plain_names(store: Store) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1))
    model[2] = torch.compile(model[2], backend="eager")
    compiled = torch.compile(model, backend="eager")
    job = created(store, compiled, buffers="own")
    assert [p.name for p in job.layout.parameters] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    with aggregating(job), kvps.torch.join(job, compiled, "w0") as worker:
        for _ in range(2):
            worker.pull()
            compiled(torch.ones(1, 2)).sum().backward()
            worker.step()
    plain = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1))
    assert kvps.torch.load(job, plain) == 2
    np.testing.assert_array_equal(plain[0].weight.detach(), job.snapshot()[1]["0.weight"])
    assert (kvps.torch.load(job, compiled), torch.equal(plain[2].bias, model[2].bias)) == (2, True)
