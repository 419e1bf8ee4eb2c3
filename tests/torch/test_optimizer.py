"""The conversion of PyTorch's optimizers, held against PyTorch's own over 60 steps on the same gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from helpers.ddp import net, weights_of
from helpers.optimizers import OPTIMIZERS
from helpers.stepping import Params, stepped
from torch import nn
from torch.optim import lr_scheduler

import kvps
import kvps.torch

STEPS = 60

Make = Callable[[Any], torch.optim.Optimizer]
RULES = [
    *(each for each in OPTIMIZERS if each.torch_name),
    kvps.Adam(0.01, beta1=0.0, beta2=0.9),
    kvps.Adam(0.01, beta1=0.3, beta2=0.5),
    kvps.Adamax(beta1=0.0, beta2=0.9),
]
FAR = 8
"""Units in the last place of a tensor's largest weight. PyTorch multiplies and adds in one
instruction on a CPU, and rounds once; kvps rounds twice, as every processor can. Its square roots may be wrong in the
last bit. Adam's step is ``(size*m)/scale`` there, and ``(m/scale)*size`` here."""


def gradients(model: nn.Module) -> Iterator[Params]:
    rng = np.random.default_rng(5)
    for _ in range(STEPS):
        yield {name: rng.normal(size=tuple(p.shape)).astype(np.float32) for name, p in model.named_parameters()}


def by_pytorch(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any = None) -> Params:
    """PyTorch's own single-tensor code, as a plain loop."""
    for group in optimizer.param_groups:
        group["foreach"] = False
    for gradient in gradients(model):
        for name, parameter in model.named_parameters():
            parameter.grad = torch.from_numpy(gradient[name]) if parameter.requires_grad else None
        optimizer.step()
        if scheduler:
            scheduler.step()
    return {name: array for name, array in weights_of(model).items() if model.get_parameter(name).requires_grad}


def by_kvps(model: nn.Module, optimizer: kvps.SGD) -> Params:
    start = {name: tensor.numpy() for name, tensor in kvps.torch.parameters(model).items()}
    return stepped(optimizer, start, ({n: g[n] for n in start} for g in gradients(model)), shards=3)


def assert_near(one: Params, other: Params, far: int = FAR) -> None:
    assert one.keys() == other.keys()
    for name in one:
        ulp = np.spacing(np.abs(other[name]).max())
        np.testing.assert_allclose(one[name], other[name], rtol=0, atol=far * ulp, err_msg=name)


def two_groups(model: nn.Module, make: Make, **of_second: Any) -> torch.optim.Optimizer:
    """Weights in one group, biases and the norm's scale in the other."""
    first = [p for p in model.parameters() if p.ndim > 1]
    second = [p for p in model.parameters() if p.ndim == 1]
    return make([{"params": first}, {"params": second, "name": "no decay"} | of_second])


def twin(rule: kvps.Optimizer, parameters: Any) -> torch.optim.Optimizer:
    """Return PyTorch's optimizer that steps as a rule."""
    settings = {f.name: getattr(rule, f.name) for f in fields(rule) if f.name not in ("groups", "clip_norm")}
    if "beta1" in settings:
        settings["betas"] = settings.pop("beta1"), settings.pop("beta2")
    made: torch.optim.Optimizer = getattr(torch.optim, rule.torch_name)(parameters, **settings)
    return made


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_each_rule_steps_as_pytorchs(rule: kvps.Optimizer) -> None:
    model = net()
    optimizer = twin(rule, model.parameters())
    assert kvps.torch.optimizer(model, optimizer) == rule
    assert_near(by_kvps(model, rule), by_pytorch(model, optimizer))


EXACT: list[Make] = [
    lambda p: torch.optim.SGD(p, lr=2**-5, weight_decay=2**-7),
    lambda p: torch.optim.SGD(p, lr=2**-5, momentum=0.5, dampening=0.5),
    lambda p: torch.optim.SGD(p, lr=2**-5, momentum=0.5, nesterov=True, weight_decay=2**-7, maximize=True),
]


@pytest.mark.parametrize("number", range(len(EXACT)))
def test_where_products_are_exact_the_bits_are_pytorchs(number: int) -> None:
    """Then it is the same whether a product is rounded before it is added: the order of operations is PyTorch's. All
    other rules take square roots, which PyTorch does not round correctly on every CPU."""
    model = net()
    optimizer = EXACT[number](model.parameters())
    ended = by_kvps(model, kvps.torch.optimizer(model, optimizer))
    for name, wanted in by_pytorch(model, optimizer).items():
        np.testing.assert_array_equal(ended[name], wanted, name)


def test_groups_differ_in_any_setting() -> None:
    for rule, other in (
        (kvps.Adagrad(0.05, weight_decay=0.01, lr_decay=0.1), {"lr": 0.003, "weight_decay": 0.0}),
        (kvps.Adam(0.01, beta1=0.8, weight_decay=0.01), {"betas": (0.5, 0.9), "eps": 1e-4}),
        (kvps.SGD(0.05, 0.9, True, 0.01), {"momentum": 0.0, "nesterov": False}),
        (kvps.SGD(0.05), {"momentum": 0.7}),
        (kvps.Adam(0.01, weight_decay=0.01), {"amsgrad": True}),
        (kvps.RMSprop(weight_decay=0.01), {"momentum": 0.5, "centered": True, "maximize": True}),
    ):
        model = net()
        optimizer = two_groups(model, partial(twin, rule), **other)
        converted = kvps.torch.optimizer(model, optimizer)
        assert [group.names for group in converted.groups] == [("1.weight", "1.bias", "3.bias")]
        assert_near(by_kvps(model, converted), by_pytorch(model, optimizer))


@pytest.mark.parametrize("setting", ["lr", "weight_decay"])
@pytest.mark.parametrize("group", [0, 1])
def test_a_setting_that_is_nan_is_refused_in_any_group(group: int, setting: str) -> None:
    model = net()
    optimizer = torch.optim.SGD([{"params": [p]} for p in model.parameters()], lr=0.1)
    optimizer.param_groups[group][setting] = float("nan")
    with pytest.raises(kvps.InvalidSetting, match=f"{setting} must be .*nan"):
        kvps.torch.optimizer(model, optimizer)


def test_a_frozen_parameter_in_a_group_is_passed_over() -> None:
    model = net()
    model[0].weight.requires_grad_(False)
    optimizer = torch.optim.SGD([{"params": model[0].parameters(), "lr": 9.0}, {"params": model[1:].parameters()}], 0.1)
    assert kvps.torch.optimizer(model, optimizer) == kvps.SGD(lr=0.1)
    before = model[0].weight.detach().clone()
    assert_near(by_kvps(model, kvps.torch.optimizer(model, optimizer)), by_pytorch(model, optimizer))
    assert torch.equal(before, model[0].weight)


def test_groups_with_the_same_settings_are_one_and_names_stand_for_themselves() -> None:
    model = nn.ParameterDict({"a*": torch.ones(2), "ab": torch.ones(2), "c": torch.ones(2)})
    groups = [{"params": [model["c"]]}] + [{"params": [model[name]], "lr": 0.5} for name in ("a*", "ab")]
    converted = kvps.torch.optimizer(model, torch.optim.SGD(groups, lr=0.1))
    assert converted == kvps.SGD(lr=0.1, groups=(kvps.ParameterGroup(["a*", "ab"], lr=0.5),))


@pytest.mark.parametrize(
    "scheduled",
    [
        lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=STEPS),
        lambda o: lr_scheduler.OneCycleLR(o, [0.01, 0.003], total_steps=STEPS + 1, cycle_momentum=False),
    ],
)
def test_a_schedule_changes_each_groups_own_rate(scheduled: Callable[[Any], Any]) -> None:
    model = net()
    optimizer = two_groups(model, partial(twin, kvps.AdamW(0.01, weight_decay=0.1, eps=1e-6)), lr=0.003)
    scheduler = scheduled(optimizer)
    ended = by_kvps(model, kvps.torch.optimizer(model, optimizer, scheduler, steps=STEPS))
    assert_near(ended, by_pytorch(model, optimizer, scheduler))
