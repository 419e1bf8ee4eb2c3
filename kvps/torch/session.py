"""A worker's side of a job whose parameters are a model's: pull fills them, step pushes their gradients."""

from __future__ import annotations

import logging
import weakref
from contextlib import suppress
from functools import partial
from operator import attrgetter
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.hooks import RemovableHandle

from kvps.arrays.layout import Array
from kvps.errors import (
    ContributionLate,
    InvalidSetting,
    JobStopped,
    JobSuspended,
    LayoutMismatch,
    UsageError,
    WrongOrder,
    not_to_be_pickled,
    some_of,
)
from kvps.job import Job
from kvps.machine.fork import ProcessOwner
from kvps.session.finished import FinishedSession
from kvps.session.session import Session
from kvps.torch.batches import Batches, batches_of
from kvps.torch.flat_tensors import FlatTensors
from kvps.torch.group import GroupSession, join_as_group
from kvps.torch.inner_optimizer import Inner
from kvps.torch.loading import trains_here
from kvps.torch.local_steps import LocalSteps
from kvps.torch.model import JobBuffers, Parameters, fill, fitting
from kvps.torch.watch import ModelWatch
from kvps.torch.weight_watch import WeightWatch

log = logging.getLogger("kvps.session")


def join(
    job: Job,
    model: torch.nn.Module,
    worker: str | None = None,
    *,
    inner: Inner | None = None,
    local_steps: int | None = None,
    overlap: bool = False,
    takeover: bool = False,
    prefetch: bool = False,
    group: dist.ProcessGroup | None = None,
) -> TorchSession:
    """Become a worker that trains `model`, as `Job.join` does; the first pull replaces the model's own weights, and its
    buffers, if the job has them.

    `inner` is an optimizer, or several that share the parameters. With it the worker takes `local_steps` steps between
    two pulls, and pushes the pseudo-gradient, float32: the weights pulled minus the weights now. `local_steps` is the
    job's if None. This keeps one more copy of the parameters, 4 bytes an item.
    With `overlap` each gradient is sent while backward computes the next: for parameters on the CPU, one backward() per
    round, and gradients that nothing changes before step().
    With `group`, all members of that gloo group are one worker: each joins with a model of its own, calls pull() and
    step() as often as the others, and the mean of their gradients is pushed once. If a member dies, the calls of the
    others raise GroupLost. Raises LayoutMismatch, InvalidSetting, and what `Job.join` raises; nothing was changed then.
    """
    params, buffers = fitting(job, model)
    trains_here(model)
    local = _local(job, params, inner, local_steps)
    if local and overlap:
        raise InvalidSetting(
            "overlap=True sends gradients during backward, and a pseudo-gradient exists only after the last local "
            "step: leave it out"
        )
    watch = WeightWatch(params, job.layout, job.id)
    device = str(next(iter(params.values())).device)
    if overlap and any(p.device.type != "cpu" for p in params.values()):
        raise InvalidSetting(
            f"overlap=True is for parameters on the CPU, these are on {device}, where backward runs on other threads: "
            f"leave it out"
        )
    if group is not None:
        if local:
            raise InvalidSetting("inner takes local steps, and the members of a group step together: leave one out")
        if overlap:
            raise InvalidSetting("overlap=True sends gradients before a group has added them up: leave it out")
        member = join_as_group(job, group, worker, device, takeover, prefetch)
        return TorchSession(member, params, buffers, watch, overlap)
    session = job.join(worker, device=device, takeover=takeover, prefetch=prefetch)
    if local and not isinstance(session, FinishedSession):
        try:
            _resume(session, local)
        except BaseException:
            session.leave(finished=False)
            raise
    return TorchSession(session, params, buffers, watch, overlap, local)


def _resume(session: Session, local: LocalSteps) -> None:
    """Have the inner optimizer go on from the state that the worker left, and say if it cannot. Raises CorruptData."""
    if session.config.unit_rounds:  # it begins anew in each unit
        return
    if local.inner.restore(session.inherited_state()):
        log.info("worker %s: its inner %s goes on from the state that it left", session.worker, local.inner.kind)
    elif session.clock and local.inner.is_new:
        log.warning(
            "worker %s: its inner %s starts anew, because the last process did not leave its state: it was killed or "
            "evicted, failed, or had another optimizer",
            session.worker,
            local.inner.kind,
        )


def _local(job: Job, params: Parameters, inner: Inner | None, local_steps: int | None) -> LocalSteps | None:
    """Return the local steps that a worker takes; None if it pushes each gradient. Raises InvalidSetting."""
    steps = job.config.local_steps if local_steps is None else local_steps
    if inner is not None:
        return LocalSteps(params, inner, steps, job.config, {p.name: p.part for p in job.layout.parameters})
    if steps != 1:
        raise InvalidSetting(f"a worker that takes {steps!r} local steps needs an optimizer for them: give inner=")
    return None


class TorchSession:
    """A worker's session and the model parameters it fills. `join` returns one; it belongs to the thread that joined.

    session   the worker's session: rank, round, clock, version, and next_unit() for units
    steps     how often step() has returned
    """

    def __init__(
        self,
        session: Session | GroupSession,
        params: Parameters,
        buffers: JobBuffers,
        weights: WeightWatch,
        overlap: bool,
        local: LocalSteps | None = None,
    ) -> None:
        self._owner = ProcessOwner(f"the session of worker {session.worker!r}")
        self.session = session
        self._params = params
        self._buffers = buffers
        self._watch = ModelWatch(buffers.model, params)
        self._weights = weights
        self._flat = FlatTensors(params | buffers.tensors, session.layout)
        self._local = local
        self._put: dict[str, tuple[torch.Tensor, int]] = {}  # sent during backward, with its count of writes then
        self._overlap = overlap
        self.steps = 0
        me = weakref.proxy(self)  # a user who drops a worker without leaving drops its session too
        hooks: list[RemovableHandle] = []
        for name, parameter in params.items() if overlap else ():
            if not parameter.requires_grad:  # if that changes, its gradient leaves with step()
                continue
            leaves = partial(TorchSession._leaves, me, name)
            hooks.append(parameter.register_post_accumulate_grad_hook(leaves))  # type: ignore[no-untyped-call]
        self._unhook = weakref.finalize(self, _remove, hooks)

    def batches(
        self,
        dataset: Any,
        *,
        batch_size: int | None = None,
        epochs: int | None = None,
        seed: bool = True,
        **loader: Any,
    ) -> Batches:
        """Yield the batches that this worker is to step on, each with the weights in the model, until all of the job's
        are done; they end for all workers at once. Whoever computes a batch, and dies or leaves meanwhile, it counts
        once.

        The job was created with `samples`, the length of `dataset`, `batch_size` and `epochs`; given here, they must be
        the same. Each epoch has all samples in an order drawn anew, from the job's seed. `dataset` has a length and
        `dataset[number]`; or `samples_per_shard` and `iterate(shard, offset)`, and then an epoch has its shards in an
        order drawn anew. `loader` are arguments of torch.utils.data.DataLoader, as num_workers, collate_fn and
        pin_memory; its processes load ahead. With `seed`, the random numbers of torch, NumPy and `random` begin anew
        for each batch, in the loader's processes and for training, from the job's seed and the unit. A batch without a
        step() comes again. Raises InvalidSetting for what does not fit the job; while iterating WrongOrder for a batch
        that came 50 times without a step, and what `pull` and `Session.next_unit` raise.
        """
        return batches_of(self, dataset, batch_size, epochs, seed, loader)

    @property
    def done(self) -> int:
        """How many of this worker's steps are in the job, all incarnations together: the number, from 0, of its next
        batch, if each is one step."""
        if self._local is None or isinstance(self.session, GroupSession):
            return self.session.clock
        return self.session.clock * self._local.steps - self.session.lacking

    @property
    def steps_of_push(self) -> int:
        """How many steps a whole round has."""
        return self._local.steps if self._local else 1

    @property
    def not_pushed(self) -> int:
        """How many local steps were taken since the last push."""
        return self._local.taken if self._local else 0

    @property
    def state(self) -> dict[str, Any]:
        """What this worker's user keeps beside the weights, see `Session.state`. Of a group, the leader's counts."""
        return self.session.state

    @state.setter
    def state(self, value: dict[str, Any]) -> None:
        self.session.state = value

    @property
    def stopping(self) -> bool:
        """Whether the job was stopped or suspended, as far as this worker knows: its loop ends soon, at `pull`."""
        return self.session.stopping

    def begin_unit(self, batches: int) -> None:
        """Begin a unit of so many batches, after `Session.next_unit`: with local steps, the last of them pushes."""
        if self._local:
            self._local.begin_unit(batches)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameters in the form of an optimizer, for torch.amp.GradScaler. Raises WrongOrder with overlap."""
        if self._overlap:  # GradScaler changes gradients without counting that as a write
            raise WrongOrder("a gradient leaves before GradScaler has unscaled it: join with overlap=False")
        return [{"params": list(self._params.values())}]

    def pull(self) -> None:
        """Begin a round as soon as the bound admits it: copy the newest weights into the model, clear its gradients.

        Between local steps, only clear the gradients. Raises LayoutMismatch if the model no longer trains what it did
        when this worker joined, and UsageError if its weights were changed since the last pull or local step; then
        nothing has changed. Raises WorkerEvicted, JobNotFound, ServerLost.
        """
        self._watch.check()
        self._weights.check()
        self._weights.forget()  # the arrays of the last pull are overwritten from now on
        if self._local:
            self._pull_to(self._local)
        else:
            self._begin(self.session.pull_flat())

    def discard_changes(self) -> None:
        """Have the next pull overwrite whatever was written into the model since the last one, without an error."""
        self._weights.forget()

    def _pull_to(self, local: LocalSteps) -> None:
        assert isinstance(self.session, Session)  # a group takes no local steps
        flat, fragment, round_ = None, dict[str, Array](), self.session.round
        if not local.under_way:
            if local.to_pull:
                fragment = self.session.pull(local.to_pull)
                if self.session.round > round_:
                    # Rounds were made without this worker, and so its own weights of the other fragments are old.
                    local.to_pull, fragment = "", {}
            if not local.to_pull:
                flat = self.session.pull_flat()
        self._begin(flat)
        fill(self._params, fragment)
        local.begin(not local.under_way)

    def _begin(self, flat: Array | None = None) -> None:
        """Clear the model's gradients, and copy weights into it, if there are new ones."""
        self._put.clear()
        for parameter in self._params.values():
            parameter.grad = None
        if flat is not None:
            self._flat.fill(self._params | self._buffers.tensors, flat)
            self._weights.note(flat)

    def step(self, loss: float | torch.Tensor | None = None, weight: int | None = None) -> int:
        """Push every parameter's `.grad`, by which the aggregator steps; return the clock that acknowledges it.

        The model's buffers go with them, if the job has any. A parameter without a gradient is as the job's `missing`
        says: left out, or zeros. `loss`, one number, is shown while the job runs. `weight` is for a job whose reduction
        is weighted, as the number of samples. Raises LayoutMismatch, NotFinite, WrongOrder, InvalidSetting for a weight
        that does not fit, and UsageError for any other loss, or if the model's weights were changed since the pull;
        nothing has changed then. Raises what else `Session.push` raises, and may then be called again as that may. With
        local steps, take one; only the last of a round pushes, with the sum of the weights, and a call that repeats its
        push takes no other. Return the clock so far. A change of the weights is part of a round of local steps, but not
        before the first one of the job: that would be another start.
        """
        self._owner.check()
        self._watch.check()
        local = self._local
        if not local or not (self.session.version or local.under_way):
            self._weights.check()
        if weight is not None:
            weight = self.session.check_weight(weight)
        if not local:
            clock = self._push(self._gradients(), loss, weight)
        else:
            over = local.take(weight)
            self._weights.forget()
            clock = self._push_steps(local, local.part(self.session.round), loss) if over else self.session.clock
        self.steps += 1
        return clock

    def _push_last(self, local: LocalSteps) -> None:
        """Push what a worker that leaves has, and how many steps of a round it lacks, so that nobody takes these for
        done."""
        assert isinstance(self.session, Session)
        accepted = self.session.lacking
        self.session.lacking += local.steps - local.taken
        try:
            self._push_steps(local, "", None)
        except BaseException:
            self.session.lacking = accepted
            raise

    def _push_steps(self, local: LocalSteps, part: str, loss: float | torch.Tensor | None) -> int:
        part, grads = local.pseudo_gradient(part)
        return self._push(grads, loss, local.weight, part)

    def _push(
        self, grads: dict[str, Any], loss: float | torch.Tensor | None, weight: int | None, part: str = ""
    ) -> int:
        grads |= self._buffers.tensors
        try:
            if isinstance(self.session, GroupSession):
                clock = self.session.push(self._flat.gathered(grads), loss)
            elif not part and (flat := self._flat.whole(grads)) is not None:
                clock = self.session.push_flat(flat, loss, weight)
            else:
                clock = self.session.push(self._flat.gathered(grads), loss, weight, part)
        except UsageError:
            raise
        except BaseException as error:
            self._put.clear()  # the session has dropped those gradients: the next call pushes all
            if self._local and isinstance(error, ContributionLate):
                self._local.dropped()
            raise
        self._put.clear()
        if self._local:
            self._weights.note(self._local.pushed())
        return clock

    def leave(self, finished: bool = True) -> None:
        """Leave as `Session.leave` does; the end of a with block does this too.

        First push the local steps that were taken and not pushed. They count as one contribution, as whole rounds do;
        with fragments it is of the whole model.
        In a job that hands out units they are dropped, and the unit goes to another worker. A worker that is not
        `finished` stores the state of its inner optimizer, with which the next `join` under its id goes on. Raises what
        `step` raises.
        """
        self._owner.check()
        if finished and (changed := self._weights.changed()):
            log.warning(
                "worker %s: weights were changed in the model after the last step, and the job does not have that: %s",
                self.session.worker,
                some_of(changed),
            )
        local = self._local
        if local and local.to_push:
            weight = local.weight
            with suppress(ContributionLate, JobStopped):  # it does not count, and there is no round after it
                if local.to_pull:
                    self.pull()  # a push needs one before it
                    local.weight = weight
                self._push_last(local)
        self._unhook()
        # Whoever has done its rounds comes back only to compute the units of dead workers.
        comes_back = not finished or self.session.config.units
        self.session.leave(finished, local.state() if local and comes_back else None)

    def _leaves(self, name: str, parameter: torch.Tensor) -> None:
        """Send a gradient that autograd has added up; not in a fork, where another session may train the model."""
        if not self._owner.is_here:
            return
        if name in self._put:
            raise WrongOrder(
                f"gradient {name!r} was sent, and is added to again, by a second backward() or by "
                f"torch.utils.checkpoint with use_reentrant=True: take use_reentrant=False, or join with overlap=False"
            )
        grad = parameter.grad
        assert grad is not None
        _check_dense(name, grad)
        assert isinstance(self.session, Session)  # a group sends nothing early
        try:
            self.session.put(name, grad.float())
        except UsageError:
            raise
        except BaseException:
            self._put.clear()
            raise
        self._put[name] = grad, grad._version

    def _gradients(self) -> dict[str, Any]:
        """Return the gradients that were not sent during backward, by name."""
        for name, (grad, written) in self._put.items():
            if self._params[name].grad is not grad or grad._version != written:
                raise WrongOrder(
                    f"gradient {name!r} was changed after it was sent: join with overlap=False to clip or unscale"
                )
        rest = {name: p for name, p in self._params.items() if name not in self._put} if self._put else self._params
        grads: dict[str, Any] = {name: p.grad for name, p in rest.items()}
        lacking = [name for name, grad in grads.items() if grad is None]
        if len(lacking) == len(self._params):
            raise WrongOrder("no parameter has a gradient: call loss.backward() between pull() and step()")
        skips = self.session.config.skips_missing
        for name in lacking:
            if skips:
                del grads[name]
            else:
                grads[name] = torch.zeros_like(self._params[name])
        if set(map(attrgetter("layout"), grads.values())) != {torch.strided}:
            for name, grad in grads.items():
                _check_dense(name, grad)
        return grads

    def __reduce__(self) -> tuple[Any, ...]:
        worker = self.session.worker
        raise not_to_be_pickled(
            f"the session of worker {worker!r} belongs to its thread", "hand over the job, and join there"
        )

    def __enter__(self) -> TorchSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if self._owner.is_here and (error is None or self.session.ended_by(error)):
            try:
                self.leave(finished=not isinstance(error, JobSuspended))
            except BaseException as failed:
                self._unhook()
                self.session.__exit__(type(failed), failed, trace)
                raise
            return isinstance(error, JobStopped)
        self._unhook()
        return self.session.__exit__(kind, error, trace)


def _remove(hooks: list[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()


def _check_dense(name: str, grad: torch.Tensor) -> None:
    if grad.layout is not torch.strided:
        raise LayoutMismatch(f"gradient {name!r} is sparse: kvps moves whole arrays, make its layer with sparse=False")
