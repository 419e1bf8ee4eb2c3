"""The conversion of PyTorch's optimizers to a job's settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from torch.optim import lr_scheduler

from kvps import optim
from kvps.errors import InvalidSetting
from kvps.optim import schedules
from kvps.torch.model import Parameters, check_steps_all, trained
from kvps.torch.scheduler import OF_SCHEDULERS, number, rates_of


def optimizer(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: lr_scheduler.LRScheduler | None = None,
    every: int = 1,
    steps: int | None = None,
    clip_norm: float = 0.0,
) -> optim.Optimizer:
    """Return the job's optimizer that steps as `optimizer` would, which is needed no more: the aggregator steps.

    `optimizer` is one of torch.optim that `kvps` has too, and has not stepped yet. Each of its parameter groups
    may have settings of its own; parameters that require no gradient are passed over. `scheduler` changes the learning
    rates, and steps after each `every` rounds. It is a StepLR, ExponentialLR, LinearLR or CosineAnnealingLR; or any
    other that depends on its step alone, which is evaluated here for so many `steps`, and whose last learning rate then
    stays. With `clip_norm` above 0 the averaged gradient is clipped, as torch.nn.utils.clip_grad_norm_ does with that
    `max_norm`. Raises InvalidSetting for what kvps does not support, LayoutMismatch.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidSetting(f"optimizer must be one of torch.optim, not {type(optimizer).__name__}")
    params = trained(model)
    if type(optimizer) not in _KINDS:
        has = ", ".join(sorted(kind.__name__ for kind in _KINDS))
        kind = type(optimizer).__name__
        raise InvalidSetting(
            f"kvps has no {kind}: of torch.optim it has {has}; any other may take local steps, as inner="
        )
    check_steps_all(optimizer.param_groups, params, "the optimizer")
    rates: list[float | schedules.Schedule]
    if scheduler is not None:
        rates = rates_of(optimizer, scheduler, every, steps)
    elif "initial_lr" in optimizer.param_groups[0]:
        raise InvalidSetting(
            "a scheduler changes this optimizer's learning rate, and the aggregator would not know: give it too, "
            "scheduler=..., with every=N if it steps after each N rounds"
        )
    else:
        rates = [float(number(group["lr"])) for group in optimizer.param_groups]
    rule = _settings(optimizer, params, rates, clip_norm)
    _check_begins(optimizer)
    return rule


def _check_begins(optimizer: torch.optim.Optimizer) -> None:
    """Raise InvalidSetting unless it has no state yet, and steps as its class does."""
    if any(
        value is not None and torch.as_tensor(value).any() for s in optimizer.state.values() for value in s.values()
    ):
        raise InvalidSetting(
            "the optimizer has a state already (it has stepped, or was given one), and a job begins with its state at "
            "zero: make a new one"
        )
    step = vars(optimizer).get("step")
    is_patched = step and not hasattr(step, "_wrapped_by_lr_sched")  # as each scheduler of PyTorch does
    if is_patched or optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise InvalidSetting(
            "the optimizer has a step of its own, a hook or a function in its place, which the aggregator would not "
            "run: register hooks on the kvps.torch.Optimizer, or do in the loop what it does"
        )


_PASSED_OVER = {"params", "param_names", "name", "foreach", "fused", "capturable", "differentiable"} | OF_SCHEDULERS
"""Settings that do not change the result, and what schedulers change or remember in a group."""
_KINDS: dict[type[torch.optim.Optimizer], type[optim.Optimizer]] = {
    getattr(torch.optim, kind.torch_name): kind for kind in optim.OPTIMIZERS.values() if kind.torch_name
}
"""The rule of kvps for each class. Settings have the same names, but for betas."""


def _settings(
    optimizer: torch.optim.Optimizer, params: Parameters, rates: Sequence[float | schedules.Schedule], clip_norm: float
) -> optim.Optimizer:
    """Return the settings of the first group, and what the others have different. `rates` has one rate a group."""
    kind = _KINDS[type(optimizer)]
    names = {id(parameter): name for name, parameter in params.items()}
    first: dict[str, Any] = {}
    others: dict[Any, list[str]] = {}  # names of parameters, by what their group has different
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if named := [names[id(p)] for p in group["params"] if id(p) in names]:
            settings = {"lr": rate} | _of_group(optimizer, group)
            first = first or settings
            different = tuple(  # NaN differs from itself, and is refused where it is a setting
                (name, value) for name, value in settings.items() if value is not first[name] and value != first[name]
            )
            others.setdefault(different, []).extend(named)
    others.pop(())
    groups = [optim.ParameterGroup(named, **dict(different)) for different, named in others.items()]
    return kind(**first, groups=tuple(groups), clip_norm=clip_norm)


def _of_group(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a parameter group, without its learning rate. Raises InvalidSetting."""
    kind_name, kind = type(optimizer).__name__, _KINDS[type(optimizer)]
    known = {field.name for field in fields(kind)}
    settings: dict[str, Any] = {}
    for name, value in ((name, number(value)) for name, value in group.items() if name not in _PASSED_OVER):
        if name == "betas":
            settings["beta1"], settings["beta2"] = map(number, value)
        elif name in kind.torch_only:
            if value != kind.torch_only[name]:
                neutral = kind.torch_only[name]
                raise InvalidSetting(f"{kind_name} with {name}={value} is not in kvps: leave it at {neutral}")
        elif name in known:
            settings[name] = value
        else:
            raise InvalidSetting(f"{kind_name} has {name}={value}, a setting that kvps does not know: leave it out")
    return settings
