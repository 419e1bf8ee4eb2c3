"""PyTorch's schedulers as schedules of a job: every learning rate is theirs, to the last bit."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.ddp import net
from helpers.schedulers import EVALUATED, FORMULAS, STEPS
from torch import nn
from torch.optim import lr_scheduler

import kvps
import kvps.torch
from kvps.optim.schedules import TableLR


class Own(lr_scheduler.LRScheduler):
    def get_lr(self) -> list[float]:
        return [base / (1 + self.last_epoch) for base in self.base_lrs]


def two_lambdas(optimizer: Any) -> lr_scheduler.LambdaLR:
    return lr_scheduler.LambdaLR(optimizer, [lambda step: 1 / (1 + step), lambda step: 0.5 ** (step // 10)])


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    first, *rest = model.parameters()
    return torch.optim.SGD([{"params": [first]}, {"params": rest, "lr": 0.03}], lr=0.1, momentum=0.9)


@pytest.mark.parametrize("scheduled", [*EVALUATED.values(), two_lambdas, Own], ids=[*EVALUATED, "two", "one's own"])
def test_a_scheduler_is_evaluated_to_the_last_bit(scheduled: Callable[[Any], Any]) -> None:
    """For each group. It changes neither scheduler nor optimizer, so that a second call returns the same."""
    model, every = net(), 3
    optimizer = two_groups(model)
    scheduler = scheduled(optimizer)
    found = kvps.torch.optimizer(model, optimizer, scheduler, every, STEPS)
    assert found == kvps.torch.optimizer(model, optimizer, scheduler, every, STEPS)
    first, *_, last = found.of_each(list(kvps.torch.parameters(model)))
    for step in range(STEPS):
        wanted = [group["lr"] for group in optimizer.param_groups]
        for round_ in (step * every, step * every + every - 1):
            assert [settings.lr_at(round_) for settings in (first, last)] == wanted, step
        optimizer.step()
        if step < STEPS - 1:
            scheduler.step()
    assert first.lr_at(10 * STEPS * every) == optimizer.param_groups[0]["lr"], "the last one stays"


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("name", FORMULAS)
def test_a_formula_is_pytorchs_up_to_its_rounding(name: str, every: int) -> None:
    """PyTorch makes each learning rate of the one before, so that its roundings add up."""
    model = net()
    optimizer = two_groups(model)
    scheduler = FORMULAS[name](optimizer)
    converted = kvps.torch.optimizer(model, optimizer, scheduler, every)
    first, *_, last = converted.of_each(list(kvps.torch.parameters(model)))
    for step in range(STEPS):
        wanted = [group["lr"] for group in optimizer.param_groups]
        rates = [settings.lr_at(step * every) for settings in (first, last)]
        assert rates == pytest.approx(wanted, rel=1e-12, abs=1e-15), step
        if isinstance(first.lr, kvps.schedules.StepLR):
            assert first.lr_at(step * every + every - 1) == first.lr_at(step * every)
        optimizer.step()
        scheduler.step()


def test_a_table_ends_where_the_rate_changes_no_more() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = kvps.torch.optimizer(model, optimizer, EVALUATED["MultiStepLR"](optimizer), steps=STEPS)
    assert isinstance(found.lr, TableLR)
    assert len(found.lr.values) == 11
    flat = kvps.torch.optimizer(model, optimizer, lr_scheduler.LambdaLR(optimizer, lambda step: 1.0), steps=STEPS)
    assert flat.lr == 0.1


def test_a_tensors_learning_rate_is_read() -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.5))
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    found = kvps.torch.optimizer(model, optimizer, scheduler, steps=4)
    assert [found.lr_at(step) for step in range(5)] == [0.5, 0.25, 0.125, 0.0625, 0.0625]
    assert optimizer.param_groups[0]["lr"].item() == 0.5


def test_evaluation_warns_of_nothing() -> None:
    model = net()
    optimizer = two_groups(model)
    scheduler = Own(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kvps.torch.optimizer(model, optimizer, scheduler, steps=5)


REFUSED: list[tuple[Callable[[Any], Any], Any, str]] = [
    (EVALUATED["LambdaLR"], None, r"LambdaLR is evaluated before the job begins: say for how many .*steps=10_000"),
    (EVALUATED["LambdaLR"], 0, "steps must be a whole number from 1 to 262144, not 0"),
    (EVALUATED["LambdaLR"], 1 << 19, "steps must be a whole number from 1 to 262144"),
    (lambda o: lr_scheduler.OneCycleLR(o, 0.3, total_steps=STEPS), STEPS, "OneCycleLR changes momentum too, .*=False"),
    (
        lambda o: lr_scheduler.OneCycleLR(o, 0.3, total_steps=10, cycle_momentum=False),
        STEPS,
        "OneCycleLR cannot be evaluated for 18 steps: ValueError: Tried to step 11 times",
    ),
    (lambda o: lr_scheduler.LambdaLR(o, lambda s: float("nan")), STEPS, "values must be finite|lr must be a finite"),
    (lr_scheduler.ReduceLROnPlateau, STEPS, "ReduceLROnPlateau depends on a loss"),
    (
        lambda o: (lr_scheduler.LinearLR(o, 0.1, 1.0, 20), lr_scheduler.StepLR(o, 30))[1],
        None,
        r"learning rate is [\d.]+, and the scheduler begins with [\d.]+: .* one SequentialLR or ChainedScheduler",
    ),
    (lambda o: "cosine", STEPS, r"scheduler must be one of torch\.optim\.lr_scheduler, not str"),
]


@pytest.mark.parametrize(("scheduled", "steps", "words"), REFUSED)
def test_schedulers_that_are_refused(scheduled: Callable[[Any], Any], steps: Any, words: str) -> None:
    model = net()
    optimizer = two_groups(model)
    with pytest.raises(kvps.InvalidSetting, match=words) as caught:
        kvps.torch.optimizer(model, optimizer, scheduled(optimizer), steps=steps)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize("name", ["ChainedScheduler", "LambdaLR"])
def test_a_scheduler_that_has_stepped_is_refused(name: str) -> None:
    model = net()
    optimizer = two_groups(model)
    scheduler = EVALUATED[name](optimizer)
    optimizer.step()
    scheduler.step()
    with pytest.raises(kvps.InvalidSetting, match="the scheduler has stepped already"):
        kvps.torch.optimizer(model, optimizer, scheduler, steps=5)
