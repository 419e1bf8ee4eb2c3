"""A worker's side of a job whose parameters are a model's: pull fills them, step pushes their gradients."""

from __future__ import annotations

import weakref
from functools import partial
from types import TracebackType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.hooks import RemovableHandle

from kvps.arrays.layout import DTYPE
from kvps.errors import InvalidSetting, LayoutMismatch, UsageError, WrongOrder
from kvps.job import Job
from kvps.machine.fork import ProcessOwner
from kvps.session.session import Session
from kvps.torch.group import GroupSession, join_as_group
from kvps.torch.model import Parameters, fill, fitting


def join(
    job: Job,
    model: torch.nn.Module,
    worker: str | None = None,
    *,
    overlap: bool = False,
    takeover: bool = False,
    prefetch: bool = False,
    group: dist.ProcessGroup | None = None,
) -> TorchSession:
    """Become a worker that trains `model`, as `Job.join` does; the first pull replaces the model's own weights.

    With `overlap` each gradient is sent while backward computes the next: for parameters on the CPU, one backward() per
    round, and gradients that nothing changes before step(). With `group`, all members of that gloo group are one
    worker: each joins with a model of its own, calls pull() and step() as often as the others, and the mean of their
    gradients is pushed once. If a member dies, the calls of the others raise GroupLost. Raises LayoutMismatch,
    InvalidSetting, and what `Job.join` raises; nothing was changed then.
    """
    params = fitting(job, model)
    device = str(next(iter(params.values())).device)
    if overlap and any(p.device.type != "cpu" for p in params.values()):
        raise InvalidSetting(
            f"overlap=True is for parameters on the CPU, these are on {device}, where backward runs on other threads: "
            f"leave it out"
        )
    if group is not None:
        if overlap:
            raise InvalidSetting("overlap=True sends gradients before a group has added them up: leave it out")
        return TorchSession(join_as_group(job, group, worker, device, takeover, prefetch), params, overlap)
    return TorchSession(job.join(worker, device=device, takeover=takeover, prefetch=prefetch), params, overlap)


class TorchSession:
    """A worker's session and the model parameters it fills. `join` returns one; it belongs to the thread that joined.

    session   the worker's session: rank, round, clock, version, and next_unit() for units
    """

    def __init__(self, session: Session | GroupSession, params: Parameters, overlap: bool) -> None:
        self._owner = ProcessOwner(f"the session of worker {session.worker!r}")
        self.session = session
        self._params = params
        self._put: dict[str, tuple[torch.Tensor, int]] = {}  # sent during backward, with its count of writes then
        self._overlap = overlap
        me = weakref.proxy(self)  # a user who drops a worker without leaving drops its session too
        hooks: list[RemovableHandle] = []
        for name, parameter in params.items() if overlap else ():
            leaves = partial(TorchSession._leaves, me, name)
            hooks.append(parameter.register_post_accumulate_grad_hook(leaves))  # type: ignore[no-untyped-call]
        self._unhook = weakref.finalize(self, _remove, hooks)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameters in the form of an optimizer, for torch.amp.GradScaler. Raises WrongOrder with overlap."""
        if self._overlap:  # GradScaler changes gradients without counting that as a write
            raise WrongOrder("a gradient leaves before GradScaler has unscaled it: join with overlap=False")
        return [{"params": list(self._params.values())}]

    def pull(self) -> None:
        """Begin a round as soon as the bound admits it: copy the newest weights into the model, clear its gradients.

        Raises WorkerEvicted, JobNotFound, ServerLost.
        """
        weights = self.session.pull()
        self._put.clear()
        for parameter in self._params.values():
            parameter.grad = None
        fill(self._params, weights)

    def step(self, loss: float | torch.Tensor | None = None) -> int:
        """Push every parameter's `.grad`, by which the aggregator steps; return the clock that acknowledges it.

        A parameter without a gradient counts as zeros. `loss`, one number, is shown while the job runs. Raises
        LayoutMismatch, NotFinite, WrongOrder, and UsageError for any other loss; nothing has changed then. Raises what
        else `Session.push` raises, and may then be called again as that may.
        """
        self._owner.check()
        grads = self._gradients()
        try:
            clock = self.session.push(grads, loss)
        except UsageError:
            raise
        except BaseException:
            self._put.clear()  # the session has dropped those gradients: the next call pushes all
            raise
        self._put.clear()
        return clock

    def leave(self, finished: bool = True) -> None:
        """Leave as `Session.leave` does; the end of a with block does this too."""
        self._unhook()
        self.session.leave(finished)

    def _leaves(self, name: str, parameter: torch.Tensor) -> None:
        """Send a gradient that autograd has added up; not in a fork, where another session may train the model."""
        if not self._owner.is_here:
            return
        if name in self._put:
            raise WrongOrder(
                f"gradient {name!r} was sent, and is added to again: join with overlap=False for several backward()"
            )
        grad = _dense(name, parameter.grad)
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
        if all(p.grad is None for p in self._params.values()):
            raise WrongOrder("no parameter has a gradient: call loss.backward() between pull() and step()")
        return {
            name: np.zeros(tuple(p.shape), DTYPE) if p.grad is None else _dense(name, p.grad).float()
            for name, p in self._params.items()
            if name not in self._put
        }

    def __enter__(self) -> TorchSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._unhook()
        self.session.__exit__(kind, error, trace)


def _remove(hooks: list[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()


def _dense(name: str, grad: torch.Tensor | None) -> torch.Tensor:
    assert grad is not None
    if grad.layout is not torch.strided:
        raise LayoutMismatch(f"gradient {name!r} is sparse: kvps moves whole arrays, make its layer with sparse=False")
    return grad
