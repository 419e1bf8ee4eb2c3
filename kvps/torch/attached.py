"""The schedulers of PyTorch that change an optimizer's rates: which there are, and how they come to where a job is."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.optim.lr_scheduler import LRScheduler

F = TypeVar("F", bound=Callable[..., Any])


class Group(dict[str, Any]):
    """A parameter group that shows the job's rate. A scheduler that is made for it asks for `initial_lr`, and begins
    with `own` in its place, the user's own rate; that is None as soon as somebody has written a rate."""

    def __init__(self, group: dict[str, Any]) -> None:
        super().__init__(group)
        self.own: Any = group["lr"]

    def __setitem__(self, name: str, value: Any) -> None:
        if name == "lr":
            self.own = None
        super().__setitem__(name, value)

    def setdefault(self, name: str, value: Any = None) -> Any:
        if name == "initial_lr" and name not in self and self.own is not None:
            value = self["lr"] = self.own
        return super().setdefault(name, value)


def known_to_schedulers(step: F) -> F:
    """Mark an optimizer's `step` that notes itself that it was called, so that no scheduler wraps it."""
    vars(step)["_wrapped_by_lr_sched"] = True
    return step


def begin(optimizer: torch.optim.Optimizer, rates: dict[int, float]) -> None:
    """Show the job's rates of these groups, as long as nobody has written one."""
    for number, rate in rates.items():
        dict.__setitem__(optimizer.param_groups[number], "lr", rate)


def attached(optimizer: torch.optim.Optimizer) -> list[LRScheduler]:
    """Return the schedulers of an optimizer that are not part of another one. It is a search through all objects,
    because an optimizer does not know its schedulers."""
    groups = optimizer.param_groups
    found: list[LRScheduler] = [
        each
        for each in gc.get_objects()
        if issubclass(type(each), LRScheduler)
        and getattr(vars(each).get("optimizer"), "param_groups", None) is groups  # a library's wrapper has the same
    ]
    parts = {id(part) for each in found for part in _parts(each)}
    return [each for each in found if id(each) not in parts]


def attach(scheduler: LRScheduler, optimizer: torch.optim.Optimizer) -> None:
    """Have a scheduler change the rates of another optimizer than that for which it was made."""
    scheduler.optimizer = optimizer
    for part in _parts(scheduler):
        attach(part, optimizer)


def _parts(scheduler: LRScheduler) -> list[LRScheduler]:
    return list(getattr(scheduler, "_schedulers", ()))


def steps_of(scheduler: LRScheduler) -> int:
    """Return how many steps a scheduler has taken."""
    own: int | None = getattr(scheduler, "last_epoch", None)
    return steps_of(_parts(scheduler)[0]) if own is None else own  # a ChainedScheduler does not count


def forward(scheduler: LRScheduler, steps: int) -> None:
    """Have a scheduler take so many steps."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its optimizer does not step, and PyTorch warns of that
        for _ in range(steps):
            scheduler.step()


class Pace:
    """How often a scheduler steps, beside its optimizer: it is due after each `every` steps of that."""

    def __init__(self, scheduler: LRScheduler, every: int = 1) -> None:
        self.scheduler, self.every, self.steps = scheduler, every, 0
        self._first = steps_of(scheduler)

    @property
    def taken(self) -> int:
        """How many steps the scheduler has taken since."""
        return steps_of(self.scheduler) - self._first

    def differs(self, slack: int) -> bool:
        """Return whether it is too slow, or too fast: it may be in front of its optimizer, of which a GradScaler leaves
        steps out."""
        due = self.steps // self.every
        return self.taken < due - slack or (self.every > 1 and self.taken > due + slack)
