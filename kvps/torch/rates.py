"""What a distributed optimizer shows of its job: learning rates, and those that schedulers set through it; no state."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any, NoReturn

import torch
from torch.optim.lr_scheduler import LRScheduler

from kvps.errors import InvalidSetting, UsageError
from kvps.job import Job
from kvps.parsing import Fields
from kvps.protocol.plan import set_lr
from kvps.torch.model import trained
from kvps.torch.scheduler import constant, number
from kvps.torch.session import TorchSession


class Rates:
    """The learning rates in an optimizer's `param_groups`: those of the last step of the job that this worker saw, as
    PyTorch has them there after a step. What somebody else writes there becomes the job's, if the worker is of rank 0;
    not what `scheduler` writes, because the job's schedule is its own."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        job: Job,
        worker: TorchSession,
        model: torch.nn.Module,
        scheduler: LRScheduler | None,
    ) -> None:
        names = {id(p): name for name, p in trained(model).items()}
        self._rule = job.config.optimizer
        rules = dict(zip(names.values(), self._rule.of_each(list(names.values())), strict=True))
        self._optimizer, self._job, self._worker, self._scheduler = optimizer, job, worker, scheduler
        of_groups = [[rules[names[id(p)]] for p in g["params"] if id(p) in names] for g in optimizer.param_groups]
        self._rules = {number: group[0] for number, group in enumerate(of_groups) if group}
        self._constants = [constant(group) for group in optimizer.param_groups]
        self._sizes = self._sizes_now()
        self._progress, lr = self._now()
        self._shown = self._rates(lr)
        self._write()

    def _now(self) -> tuple[float, float | None]:
        """Return how far the job's schedules have come, and the rate that was set for it."""
        names = ("contributions", "lr")
        values = self._job.access.client.call("HMGET", self._job.access.keys.version, *names)
        f = Fields({name: value for name, value in zip(names, values, strict=True) if value}, "the version")
        return self._job.config.progress(self._worker.session.version, f.whole("contributions")), set_lr(f)

    def _rates(self, lr: float | None) -> dict[int, float]:
        return {group: self._rule.lr_of(rule, self._progress, lr) for group, rule in self._rules.items()}

    def _sizes_now(self) -> list[int]:
        return [len(group["params"]) for group in self._optimizer.param_groups]

    def _write(self) -> None:
        for group, rate in self._shown.items():
            self._optimizer.param_groups[group]["lr"] = rate

    def show(self) -> None:
        """Put the rates of the step that the job has just taken into the groups."""
        progress, lr = self._now()
        self._shown = self._rates(lr)
        self._progress = progress
        self._write()

    def take(self) -> None:
        """Set the job's learning rate to one that somebody else has put into the groups. Raises InvalidSetting for
        rates in another proportion, and for another setting; UsageError for other groups, or a state of their own."""
        if not isinstance(self._optimizer.state, StateOfJob):
            StateOfJob().refuse()
        if self._sizes_now() != self._sizes:
            raise UsageError(
                "param_groups has other parameters than the job, which trains those that it began with: freeze some "
                "with requires_grad_(False)"
            )
        for group, first in zip(self._optimizer.param_groups, self._constants, strict=True):
            for name, value in first.items():
                if number(group.get(name)) != value:
                    raise InvalidSetting(
                        f"{name} was set to {group.get(name)}, and a job changes its learning rate alone: leave it at "
                        f"{value}; of a scheduler, give it cycle_momentum=False"
                    )
        rates = {group: float(self._optimizer.param_groups[group]["lr"]) for group in self._shown}
        of_scheduler = [float(rate) for rate in self._scheduler.get_last_lr()] if self._scheduler else None
        if self._worker.session.rank or rates == self._shown:
            return
        if of_scheduler and all(rate == of_scheduler[group] for group, rate in rates.items()):
            return
        lr = next(iter(rates.values()))  # the job's own rate is that of the first group
        for rate, kept in zip(rates.values(), self._rates(lr).values(), strict=True):
            if not math.isclose(rate, kept, rel_tol=1e-6):
                shown = ", ".join(f"{each:g}" for each in rates.values())
                raise InvalidSetting(
                    f"the learning rates of the groups were set to {shown}, "
                    f"and a job keeps their proportion: set all by the same factor, or give the scheduler, made for "
                    f"the optimizer of PyTorch, as Optimizer(optimizer, model, scheduler)"
                )
        self._job.set_lr(lr, "the learning rate in param_groups")


class StateOfJob(defaultdict[torch.Tensor, Any]):
    """The state of a distributed optimizer: empty, and refuses to be changed or asked for a parameter's."""

    def refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise UsageError(
            "the state of the optimizer is the job's (momentum, moments): this script can neither read nor reset it; "
            "begin another job to begin with zeros"
        )

    __missing__ = __setitem__ = setdefault = update = pop = popitem = clear = refuse
