"""An optimizer of torch.optim whose steps a job takes: for loops that PyTorch users and their libraries have already.

    optimizer = kvps.torch.Optimizer(adamw, model)
    for x, y in batches:
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()  # pushes the gradients, and pulls the next weights into the model

It holds a `TorchSession` that has always pulled: so whoever evaluates, clips or clears gradients between two steps sees
the weights that the next gradient is computed on.
"""

from __future__ import annotations

import atexit
import logging
import math
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any, Unpack, cast

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LRScheduler

from kvps import launch, optim
from kvps.config import JobSettings, takes_settings
from kvps.errors import InvalidSetting, JobSuspended, KvpsError, UsageError, WrongOrder
from kvps.job import Job
from kvps.machine.fork import ProcessOwner
from kvps.session.finished import FinishedSession
from kvps.torch.attached import Group, known_to_schedulers
from kvps.torch.inner_optimizer import Inner
from kvps.torch.loading import load
from kvps.torch.model import parameters
from kvps.torch.optimizer import optimizer as translated
from kvps.torch.rates import Rates
from kvps.torch.session import TorchSession, join

log = logging.getLogger("kvps.session")
_STATE = "kvps"
_OF_SCHEDULE = ("every", "steps", "clip_norm")
_OF_JOIN = ("worker", "takeover", "prefetch", "group")


class Options(JobSettings, total=False):
    """The other keywords of `Optimizer`: those of `kvps.torch.optimizer`, `parameters` and `join`, and a job's."""

    every: int
    steps: int | None
    clip_norm: float
    buffers: str
    worker: str | None
    takeover: bool
    prefetch: bool
    group: dist.ProcessGroup | None
    name: str


class Optimizer(torch.optim.Optimizer):
    """An optimizer of torch.optim that trains `model` together with the other workers of a job. Each step pushes the
    gradients, waits as the job's bound asks, and fills the model with the next weights. Gradients stay until
    `zero_grad`. It belongs to the thread that made it; in a fork it does nothing.

    worker   the worker: its `session`, `batches(dataset)`, `leave`
    job      the job
    rank     the worker's number in the job, from 0
    workers  the number of workers for which the job waits
    """

    @takes_settings
    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: torch.nn.Module,
        /,
        scheduler: LRScheduler | None = None,
        job: Job | None = None,
        inner: Inner | None = None,
        **options: Unpack[Options],
    ) -> None:
        """Join a job that steps as `optimizer` would, which is not stepped any more, and fill the model with its
        weights.

        Under `kvps run` that is the job of the run: its rank 0 creates it, with the settings in `options` (those of
        `Store.create_job`). Once this optimizer is closed, the next one of the script has a job of its own; two at once
        need a `name`, as in name="critic". Without `kvps run` this process is the only worker of a job of its own. With
        `job` it joins that one, whose optimizer must be the same. `scheduler`, made for `optimizer`, is translated with
        it; the loop may go on calling its step(). `every`, `steps` and `clip_norm` are as for `kvps.torch.optimizer`,
        `buffers` as for `kvps.torch.parameters`, `inner` (whose number of steps is the job's `local_steps`), `worker`,
        `takeover`, `prefetch` and `group` as for `kvps.torch.join`. Raises what these raise, and InvalidSetting.
        """
        given = cast(dict[str, Any], dict(options))
        if "optimizer" in given:
            raise InvalidSetting("leave out optimizer=: it comes first, and the job's is made from it")
        how = {name: given.pop(name) for name in _OF_SCHEDULE if name in given}
        joins = {name: given.pop(name) for name in _OF_JOIN if name in given}
        self._owner = ProcessOwner("the optimizer of a worker")
        self._model, self._closed = model, False
        self._run = launch.from_env() if job is None else None  # whose errors are one line from here on
        try:
            rule = translated(model, optimizer, scheduler, **how)
            if job:
                self.job = _checked(job, rule, given)
            elif self._run:
                start = parameters(model, given.pop("buffers", "own"))
                self.job = self._run.create_job(start, **given, optimizer=rule)
                joins.setdefault("worker", self._run.id)
            self.worker: TorchSession = join(self.job, model, inner=inner, **joins)
        except BaseException:
            if self._run:
                self._run.close()
            raise
        atexit.register(self._at_exit, getattr(sys, "last_value", None))
        try:
            super().__init__([Group(group) for group in optimizer.param_groups], dict(optimizer.defaults))
            optimizer.param_groups = self.param_groups  # a scheduler that was made for it goes on there
            self._steps_before = 0
            self._passed_over: float = math.inf if isinstance(self.worker.session, FinishedSession) else 0
            self._rates = Rates(self, self.job, self.worker, model, scheduler, how.get("every", 1))
            self._pull()
        except BaseException:
            self.close(finished=False)
            raise

    @property
    def rank(self) -> int:
        return self.worker.session.rank

    @property
    def workers(self) -> int:
        return self.job.config.workers

    @property
    def steps(self) -> int:
        """How many steps this worker has taken; with `load_state_dict`, also those before."""
        return self._steps_before + self.worker.steps

    @known_to_schedulers
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        loss: float | torch.Tensor | None = None,
        weight: int | None = None,
    ) -> Any:
        """Push the gradients, and fill the model with the weights of the next round as soon as the bound admits it.

        `closure` computes the gradients and returns the loss, which is returned. In a job that hands out units, the
        next weights come with the next unit, as from `worker.batches`. `loss` and `weight` are as for
        `TorchSession.step`. A learning rate that somebody has put into `param_groups` becomes the job's, see
        `Job.set_lr`, if the worker is of rank 0; with others it has no effect. Raises InvalidSetting for rates in
        another proportion, and what `TorchSession.step` and `pull` raise. After `load_state_dict`, a step that the job
        has already only calls `closure`.
        """
        self._opt_called = True  # schedulers warn if they step before
        if closure is not None and not callable(closure):
            raise UsageError("step() takes a function that computes the gradients: give a loss as step(loss=loss)")
        known = self._passed_over > 0
        if not known:
            self._rates.take()
        result = None
        if closure is not None:
            with torch.enable_grad():
                loss = result = closure()
        if known:
            self._passed_over -= 1
            self._steps_before += 1
            if not self._passed_over:
                self._pull()  # a library may have loaded weights of its own meanwhile
                self._rates.show(keeps=True)
            return result
        self.worker.step(loss, weight)
        if not self.job.config.units:
            self._pull()
        self._rates.show()
        return result

    def _pull(self) -> None:
        """Fill the model with the next weights; gradients stay as they are, as after a step of PyTorch."""
        grads = [(p, p.grad) for group in self.param_groups for p in group["params"]]
        if not self.job.config.units or self._passed_over == math.inf:
            self.worker.discard_changes()  # `step` has checked; before, what a library has loaded counts for nothing
            self.worker.pull()
        for parameter, _ in grads:
            parameter.grad = None
        for parameter, grad in grads:
            parameter.grad = grad

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises InvalidSetting once the job is there, which has the parameters that it began with."""
        if hasattr(self, "_rates"):
            raise InvalidSetting(
                "a job trains the parameters that it began with: give the optimizer all its groups before, or begin "
                "another job"
            )
        super().add_param_group(param_group)

    # -- saved and resumed -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what a script needs to go on: the parameter groups, and under "kvps" the job, the worker's clock, how
        many steps it has taken, which of its steps in the job the next one is, and its `state`. Momentum and moments
        are in the job: `kvps checkpoint save` saves them. While steps are passed over, the clock is that of the loop.
        """
        over = int(self._passed_over) if self._passed_over < math.inf else 0
        clock, step = self.worker.session.clock, self.worker.done + self.worker.not_pushed - over
        clock -= math.ceil(over / self.worker.steps_of_push) if over else 0
        own = {"job": self.job.name, "id": self.job.id, "clock": clock, "steps": self.steps, "step": step}
        own |= {"state": dict(self.worker.state), "rates": self._rates.shown}
        return super().state_dict() | {_STATE: own}

    def __getstate__(self) -> dict[str, Any]:
        raise UsageError("a worker's optimizer cannot be copied or pickled: save its state_dict()")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where `state_dict` was: fill the model with the job's weights, and count steps from there.

        The job must have come as far: it is the same, or one of that name that was restored from a checkpoint. If it
        has gone on since, a line is logged, and of the next steps those that it has already are passed over, so that a
        loop that begins where it was saved does none twice. A job that hands out units has no such steps. Raises
        InvalidSetting if the job has not come as far, ValueError for other groups of parameters.
        """
        own = state_dict.get(_STATE)
        if not isinstance(own, dict) or not {"job", "id", "clock", "steps", "state"} <= own.keys():
            raise InvalidSetting(
                "this is not the state of a kvps.torch.Optimizer: a job begins with momentum and moments at zero, so "
                "leave it out, or go on from a checkpoint of the job"
            )
        passed_over = self._go_on_from({"step": own["steps"]} | own)  # states of before have none
        groups = self.param_groups  # a scheduler knows these
        super().load_state_dict(state_dict)
        self._rates.keep(groups)
        self._steps_before = own["steps"] - self.worker.steps
        self._passed_over = passed_over if self._passed_over < math.inf else math.inf
        self._pull()  # a library has just loaded a checkpoint of its own into the model
        if own["steps"] or passed_over:  # and not what accelerate has saved just before
            self._rates.loaded(own.get("rates"), passed_over > 0)

    def _go_on_from(self, own: dict[str, Any]) -> int:
        """Take the worker's state, if the job is where it was; return how many steps the job has that came after it.
        Raises InvalidSetting if it has not come there."""
        then, now, config, worker = own["clock"], self.worker.session.clock, self.job.config, self.worker
        if then != now and ((own["id"] != self.job.id and own["job"] != self.job.name) or then > now):
            raise InvalidSetting(
                f"this state is of job {own['job']!r} at clock {then}, and in job {self.job.name!r} this worker is at "
                f"clock {now}: restore a checkpoint of then (kvps checkpoint restore), or begin without this state"
            )
        steps = 0 if config.units else worker.done + worker.not_pushed - own["step"]
        if then == now and not steps:
            worker.state = own["state"]
            return 0
        if worker.steps:
            raise InvalidSetting(
                f"this state is of clock {then}, and this process has trained on to {now}: a job cannot go back. Run "
                f"what tries out and goes back, as LearningRateFinder, alone before, with the optimizer of PyTorch"
            )
        if steps < 0:
            raise InvalidSetting(
                f"this state is of step {own['step']} of this worker, and the job has {worker.done}: resume from one "
                f"of where a round of local steps ended, as every {worker.steps_of_push} steps"
            )
        log.warning(
            "worker %s: the job has gone on since this state was saved, from %d to %d of its pushes: the next %d steps "
            "are passed over, for it has them",
            self.worker.session.worker,
            then,
            now,
            steps,
        )
        return steps

    # -- the end -----------------------------------------------------------------------------------------------

    def close(self, finished: bool = True) -> None:
        """Leave the job, as `TorchSession.leave` does; a job of this process alone ends. Does nothing in a fork, and
        the second time. Without it the worker leaves when the interpreter ends: finished, unless by an exception."""
        if self._begin_close():
            try:
                self.worker.leave(finished)
            finally:
                self._end_run()

    def finish(self) -> int:
        """Leave the job, wait until all workers have done all their steps, and fill the model with the last version.
        Return that version; a line says if others have left before their last step. A job of this process alone ends.

        Call it in the place of `close`, in the `with` block; after a stop, the end of the block does it. Raises
        JobSuspended if the job was suspended, WrongOrder if this worker has left.
        """
        if not self._begin_close():
            raise WrongOrder("the optimizer has left its job already: call finish() in the with block, or for close()")
        try:
            self.worker.leave()
            return self._await_last()
        finally:
            self._end_run()

    def _await_last(self) -> int:
        finished = self.job.await_finished()
        if (run := self.job.state().run).state == "suspended":
            raise JobSuspended(f"job {self.job.name!r} was {run.why}; it goes on from here when it is resumed")
        version = load(self.job, self._model)
        if not finished:
            log.warning("the other workers have left with steps undone: the model has version %d", version)
        return version

    def _begin_close(self) -> bool:
        """Return whether this call is the one that closes."""
        if self._closed or not self._owner.is_here:
            return False
        self._closed = True
        atexit.unregister(self._at_exit)
        return True

    def _end_run(self) -> None:
        if self._run:
            self._run.close()

    def _at_exit(self, earlier: BaseException | None) -> None:
        """Leave. The interpreter has the exception that ends it in sys.last_value; before, an `earlier` one. It is
        none that a suspended job ends the script with."""
        error = getattr(sys, "last_value", None)
        try:
            if self._owner.is_here:
                suspended = self.worker.stopping and self.job.state().run.state == "suspended"
                self.close(finished=error in (None, earlier) and not suspended)
        except KvpsError as failed:
            log.warning("%s", failed)

    def __enter__(self) -> Optimizer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not self._begin_close():
            return False
        try:
            stopped = self.worker.__exit__(kind, error, trace)
            if stopped:
                self._await_last()
            return stopped
        finally:
            self._end_run()


def _checked(job: Job, rule: optim.Optimizer, settings: dict[str, Any]) -> Job:
    """Return a job that was made elsewhere. Raises InvalidSetting if it steps by another rule, or for `settings`."""
    if settings:
        raise InvalidSetting(f"job {job.name!r} has its settings already: leave out {', '.join(settings)}")
    if (present := job.config.optimizer) != rule:
        raise InvalidSetting(
            f"job {job.name!r} steps by {present}, and this optimizer is {rule.beside(present)}: give the optimizer, "
            f"and the scheduler, with which the job was made"
        )
    return job
