"""The conversion of PyTorch's schedulers to schedules of the learning rate, one for each parameter group."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import lr_scheduler

from kvps.errors import InvalidSetting
from kvps.optim import schedules
from kvps.optim.schedules import MOST_STEPS

OF_SCHEDULERS = {"lr", "initial_lr", "max_lr", "min_lr", "swa_lr", "base_momentum", "max_momentum"}
"""What schedulers change or remember in a parameter group."""
_FORMULAS: dict[type[lr_scheduler.LRScheduler], Callable[[Any, float, int], schedules.Schedule]] = {
    lr_scheduler.StepLR: lambda s, lr, every: schedules.StepLR(lr, s.step_size * every, s.gamma),
    lr_scheduler.ExponentialLR: lambda s, lr, every: schedules.StepLR(lr, every, s.gamma),
    lr_scheduler.LinearLR: lambda s, lr, every: schedules.LinearLR(
        lr * s.start_factor, lr * s.end_factor, s.total_iters * every
    ),
    lr_scheduler.CosineAnnealingLR: lambda s, lr, every: schedules.CosineAnnealingLR(lr, s.T_max * every, s.eta_min),
}


def rates_of(
    optimizer: torch.optim.Optimizer, scheduler: lr_scheduler.LRScheduler, every: int, steps: int | None
) -> list[float | schedules.Schedule]:
    """Return the learning rate of each parameter group; the arguments are as for `kvps.torch.optimizer`. Raises
    InvalidSetting."""
    _check(optimizer, scheduler, every)
    if type(scheduler) in _FORMULAS:
        convert = _FORMULAS[type(scheduler)]
        converted = [convert(scheduler, float(number(rate)), every) for rate in scheduler.base_lrs]
        for rate, group in zip(converted, optimizer.param_groups, strict=True):
            _check_alone(rate.at(0.0), float(number(group["lr"])))
        return list(converted)
    kind = type(scheduler).__name__
    if steps is None:
        raise InvalidSetting(
            f"{kind} is evaluated before the job begins: say for how many of its steps, as steps=10_000"
        )
    if type(steps) is not int or not 1 <= steps <= MOST_STEPS:
        raise InvalidSetting(f"steps must be a whole number from 1 to {MOST_STEPS}, not {steps!r}")
    return [_rate(table, every) for table in _tables(optimizer, scheduler, steps)]


def number(value: Any) -> Any:
    """Return the number in a one-item tensor, as a learning rate may be; anything else unchanged."""
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def _check(optimizer: torch.optim.Optimizer, scheduler: lr_scheduler.LRScheduler, every: int) -> None:
    """Raise InvalidSetting for a scheduler that is none, another optimizer's, or that has stepped."""
    if not isinstance(scheduler, lr_scheduler.LRScheduler):
        raise InvalidSetting(f"scheduler must be one of torch.optim.lr_scheduler, not {type(scheduler).__name__}")
    if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
        raise InvalidSetting(
            "ReduceLROnPlateau depends on a loss, which no two workers have alike, and a job's schedule on its step "
            "alone: make it for the kvps.torch.Optimizer, or use a schedule of steps"
        )
    if type(every) is not int or every < 1:
        raise InvalidSetting(f"every must be a whole number of rounds from 1, not {every!r}")
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise InvalidSetting("the scheduler is another optimizer's: give the one that changes this one's learning rate")
    if any(getattr(each, "last_epoch", 0) > 0 for each in (scheduler, *getattr(scheduler, "_schedulers", ()))):
        raise InvalidSetting("the scheduler has stepped already, and a job begins at its first step: make a new one")


def _check_alone(first: float, now: float) -> None:
    """Raise InvalidSetting unless a schedule begins with the learning rate that its optimizer has now."""
    if not math.isclose(first, now, rel_tol=1e-6):
        raise InvalidSetting(
            f"the optimizer's learning rate is {now:g}, and the scheduler begins with {first:g}: if another scheduler "
            f"changes it too, give both as one SequentialLR or ChainedScheduler"
        )


def _tables(optimizer: torch.optim.Optimizer, scheduler: lr_scheduler.LRScheduler, steps: int) -> list[list[float]]:
    """Return the learning rates of the first `steps` steps, of each parameter group. Raises InvalidSetting.

    A copy of the scheduler steps, with a copy of the optimizer that shares its parameters and does not step.
    """
    shared = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    try:
        scheduler, optimizer = copy.deepcopy((scheduler, optimizer), shared)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the optimizer does not step, and PyTorch warns of that
            return _evaluated(optimizer.param_groups, scheduler, steps)
    except InvalidSetting:
        raise
    except Exception as error:  # it may be the user's own, and raise anything
        kind, first = type(scheduler).__name__, str(error).partition("\n")[0]
        raise InvalidSetting(
            f"{kind} cannot be evaluated for {steps} steps: {type(error).__name__}: {first}"
        ) from error


def _evaluated(groups: list[dict[str, Any]], scheduler: lr_scheduler.LRScheduler, steps: int) -> list[list[float]]:
    """Return the learning rates of each group while the scheduler steps. Raises InvalidSetting if it changes more."""
    tables: list[list[float]] = [[] for _ in groups]
    before = list(map(constant, groups))
    for step in range(steps):
        if step:
            scheduler.step()
        for table, group, first in zip(tables, groups, before, strict=True):
            table.append(float(number(group["lr"])))
            for name, value in constant(group).items():
                if value != first.get(name):
                    raise InvalidSetting(
                        f"{type(scheduler).__name__} changes {name} too, and a job's schedule changes the learning "
                        f"rate alone: give it cycle_momentum=False"
                    )
    return tables


def constant(group: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a parameter group that a schedule must leave as they are."""
    return {name: number(value) for name, value in group.items() if name != "params" and name not in OF_SCHEDULERS}


def _rate(table: list[float], every: int) -> float | schedules.Schedule:
    """Return a schedule with these learning rates; a number if they are all the same."""
    count = len(table)
    while count > 1 and table[count - 1] == table[count - 2]:  # the last one stays in any case
        count -= 1
    return table[0] if count == 1 else schedules.TableLR(tuple(table[:count]), every)
