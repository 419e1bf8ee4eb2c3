"""What a distributed optimizer shows of its job: learning rates, and those that schedulers set through it; no state."""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from typing import Any, NoReturn

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from kvps.errors import InvalidSetting, UsageError, counted
from kvps.job import Job
from kvps.parsing import Fields
from kvps.protocol.plan import set_lr
from kvps.torch.attached import Pace, attach, attached, begin, forward, steps_of
from kvps.torch.model import trained
from kvps.torch.scheduler import constant, number
from kvps.torch.session import TorchSession

log = logging.getLogger("kvps.session")


class Rates:
    """The learning rates in an optimizer's `param_groups`: those of the last step of the job that this worker saw, as
    PyTorch has them there after a step. What somebody else writes there becomes the job's, if the worker is of rank 0;
    not what `scheduler` writes, because the job's schedule is its own, which steps after each `every` steps.

    A scheduler that is made for the optimizer begins with the user's own rate, and goes on where the job is if this
    worker comes back. In workers of other ranks it alone changes what is shown: it has the same rates as that of rank 0
    in the same step, which the job may be ahead of.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        job: Job,
        worker: TorchSession,
        model: torch.nn.Module,
        scheduler: LRScheduler | None,
        every: int,
    ) -> None:
        names = {id(p): name for name, p in trained(model).items()}
        self._rule = job.config.optimizer
        rules = dict(zip(names.values(), self._rule.of_each(list(names.values())), strict=True))
        self._optimizer, self._job, self._worker = optimizer, job, worker
        self._scheduler, self._every = scheduler, every
        self._pace: Pace | None = None
        self._first = True  # no step was taken or loaded
        of_groups = [[rules[names[id(p)]] for p in g["params"] if id(p) in names] for g in optimizer.param_groups]
        self._rules = {number: group[0] for number, group in enumerate(of_groups) if group}
        self._constants = [constant(group) for group in optimizer.param_groups]
        self._sizes = self._sizes_now()
        self._progress, lr = self._now()
        if scheduler:
            attach(scheduler, optimizer)
            forward(scheduler, int(self._progress) // every)
        self._shown = self._rates(lr)
        begin(optimizer, self._shown)
        optimizer.state = StateOfJob()

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

    def _written(self) -> dict[int, float]:
        return {group: float(self._optimizer.param_groups[group]["lr"]) for group in self._rules}

    def _write(self, keeps: bool = False) -> None:
        """Put the job's rates into the groups; with `keeps` only where no scheduler was made for them."""
        for group, rate in self._shown.items():
            if self._scheduler or not keeps or "initial_lr" not in self._optimizer.param_groups[group]:
                self._optimizer.param_groups[group]["lr"] = rate

    def _look(self) -> None:
        progress, lr = self._now()
        self._shown = self._rates(lr)
        self._progress = progress

    def show(self, keeps: bool = False) -> None:
        """Put the rates of the step that the job has just taken into the groups; see `_write`. In other workers than
        that of rank 0, whose next rate the job may have already, a scheduler has them there."""
        self._look()
        self._write(keeps or self._worker.session.rank > 0)

    # -- saved and loaded --------------------------------------------------------------------------------------

    @property
    def shown(self) -> list[float]:
        """The job's rates, of each group. A group that has another one was written to, and no step has set that yet."""
        return list(self._shown.values())

    def keep(self, groups: list[dict[str, Any]]) -> None:
        """Put what was loaded into these `groups`, which schedulers know, and leave out a state that was loaded."""
        for group, loaded in zip(groups, self._optimizer.param_groups, strict=True):
            for name, value in loaded.items():
                if name != "params" and group.get(name) != value:
                    group[name] = value
        self._optimizer.param_groups, self._optimizer.state = groups, StateOfJob()

    def loaded(self, shown: object, behind: bool) -> None:
        """Note that a state was loaded into the groups, and what `shown` was then. If the loop is `behind` the job, its
        schedulers have the rates of the steps that the job has already."""
        self._first, self._pace = False, None
        if behind or shown != list(self._written().values()):
            self._look()
        else:
            self.show()

    # -- written by others -------------------------------------------------------------------------------------

    def take(self) -> None:
        """Set the job's learning rate to one that somebody else has put into the groups. Raises InvalidSetting for
        rates in another proportion, for another setting, and for a scheduler that is not where the job is; UsageError
        for other groups, or a state of their own."""
        if not isinstance(self._optimizer.state, StateOfJob):
            StateOfJob().refuse()
        if self._sizes_now() != self._sizes:
            raise UsageError(
                "param_groups has other parameters than the job, which trains those that it began with: freeze some "
                "with requires_grad_(False)"
            )
        if self._first:
            self._first = False
            self._come_back()
        for group, first in zip(self._optimizer.param_groups, self._constants, strict=True):
            for name, value in first.items():
                if number(group.get(name)) != value:
                    raise InvalidSetting(
                        f"{name} was set to {group.get(name)}, and a job changes its learning rate alone: leave it at "
                        f"{value}; of a scheduler, give it cycle_momentum=False"
                    )
        self._check_pace()
        rates = self._written()
        of_scheduler = [float(rate) for rate in self._scheduler.get_last_lr()] if self._scheduler else None
        if self._worker.session.rank or rates == self._shown:
            return
        if of_scheduler and all(rate == of_scheduler[group] for group, rate in rates.items()):
            return
        lr = next(iter(rates.values()))  # the job's own rate is that of the first group
        if not _same(rates, self._rates(lr)):
            shown = ", ".join(f"{each:g}" for each in rates.values())
            raise InvalidSetting(
                f"the learning rates of the groups were set to {shown}, "
                f"and a job keeps their proportion: set all by the same factor, or give the scheduler, made for "
                f"the optimizer of PyTorch, as Optimizer(optimizer, model, scheduler)"
            )
        self._job.set_lr(lr, "the learning rate in param_groups")

    def _come_back(self) -> None:
        """If this worker has come back, bring a scheduler that was made for the optimizer to where the job is. Raises
        InvalidSetting if the job's rate shows that it does not step with each step, or if that cannot be known."""
        session, config = self._worker.session, self._job.config
        steps = session.clock * config.batches_per_round
        found = [each for each in attached(self._optimizer) if each is not self._scheduler] if steps else []
        if steps and not (found or self._scheduler or session.rank) and self._written() == self._shown:
            self._warn_of_own_rate()
        plateaus = [each for each in found if isinstance(each, ReduceLROnPlateau)]
        if any(each.best == each.mode_worse for each in plateaus) and not session.rank:
            log.warning(
                "worker %s: its ReduceLROnPlateau goes on with the job's rate, and has forgotten its best value: keep "
                "its best, num_bad_epochs and cooldown_counter in optimizer.worker.state, and put them back",
                session.worker,
            )
        found = [each for each in found if each not in plateaus]
        if found and steps_of(found[0]) > 1:  # somebody has brought it there
            for group, rate in zip(self._optimizer.param_groups, found[0].get_last_lr(), strict=True):
                group["lr"] = float(rate)
            return
        before = self._shown
        for each in found:
            forward(each, steps - 1)
            before = self._written()
            forward(each, 1)
        if found and not session.rank:
            fits = _same(before, self._shown) or _same(self._written(), self._shown)
            if self._scheduler or len(found) > 1 or not fits:
                raise self._unknown(found[0], steps)
            self._pace = Pace(found[0])

    def _warn_of_own_rate(self) -> None:
        lr = self._now()[1]
        if lr is not None:
            log.warning(
                "worker %s goes on with %g, the learning rate that was set: if the script wrote another one after its "
                "last step, that one is lost; derive it from session.clock, or use a scheduler of PyTorch",
                self._worker.session.worker,
                lr,
            )

    def _check_pace(self) -> None:
        """Raise InvalidSetting if a scheduler does not step as the job's schedule does, or one that was brought to
        where the job is not with each step."""
        config = self._job.config
        if self._scheduler and not self._pace and not config.units:
            self._pace = Pace(self._scheduler, self._every * config.batches_per_round)
        if not self._pace:
            return
        if not self._scheduler and self._pace.differs(0):
            raise self._unknown(self._pace.scheduler, self._worker.session.clock)
        if self._scheduler and self._pace.taken and self._pace.differs(1):
            raise InvalidSetting(
                f"{type(self._scheduler).__name__} has taken {counted(self._pace.taken, 'step')} in {self._pace.steps} "
                f"of the optimizer, and in the job it takes one after each {self._pace.every}: say every=, how many "
                f"steps of the optimizer it has for one of its own"
            )
        self._pace.steps += 1
        if self._pace.steps > 2 and not self._scheduler:
            self._pace = None

    def _unknown(self, scheduler: LRScheduler, steps: int) -> InvalidSetting:
        return InvalidSetting(
            f"this worker comes back after {steps} steps, and where its {type(scheduler).__name__} was is not known, "
            f"for it does not step with each of them: make it for the optimizer of PyTorch, and give it as "
            f"Optimizer(optimizer, model, scheduler, every=N)"
        )


def _same(rates: dict[int, float], others: dict[int, float]) -> bool:
    return all(math.isclose(*pair, rel_tol=1e-6) for pair in zip(rates.values(), others.values(), strict=True))


class StateOfJob(defaultdict[torch.Tensor, Any]):
    """The state of a distributed optimizer: empty, and refuses to be changed or asked for a parameter's."""

    def refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise UsageError(
            "the state of the optimizer is the job's (momentum, moments): this script can neither read nor reset it; "
            "begin another job to begin with zeros"
        )

    __missing__ = __setitem__ = setdefault = update = pop = popitem = clear = refuse
