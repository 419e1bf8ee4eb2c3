"""A worker's side of a job whose parameters are a model's: pull fills them, step pushes their gradients."""

from __future__ import annotations

import weakref
from functools import partial
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch.utils.hooks import RemovableHandle

from kvps.arrays.layout import DTYPE
from kvps.errors import InvalidSetting, LayoutMismatch, UsageError, WrongOrder
from kvps.job import Job
from kvps.machine.fork import ProcessOwner
from kvps.session.session import Session
from kvps.torch.model import Parameters, fill, fitting


def join(
    job: Job,
    model: torch.nn.Module,
    worker: str | None = None,
    *,
    overlap: bool = False,
    takeover: bool = False,
    prefetch: bool = False,
) -> TorchSession:
    """Become a worker that trains `model`, as `Job.join` does; the first pull replaces the model's own weights.

    With `overlap` each gradient leaves while backward computes the next: for parameters on the CPU, one backward() a
    round, and gradients that nobody changes before step(). Raises LayoutMismatch, InvalidSetting, and what `Job.join`
    raises; then nothing was changed.
    """
    params = fitting(job, model)
    device = str(next(iter(params.values())).device)
    if overlap and any(p.device.type != "cpu" for p in params.values()):
        raise InvalidSetting(
            f"overlap=True is for parameters on the CPU, these are on {device}, where backward runs on other threads: "
            f"leave it out"
        )
    return TorchSession(job.join(worker, device=device, takeover=takeover, prefetch=prefetch), params, overlap)


class TorchSession:
    """A session, and the parameters it fills. `join` makes one; it belongs to the thread that joined.

    session   the worker's session: rank, round, clock, version, and next_unit() for units
    """

    def __init__(self, session: Session, params: Parameters, overlap: bool) -> None:
        self._owner = ProcessOwner(f"the session of worker {session.worker!r}")
        self.session = session
        self._params = params
        self._put: dict[str, tuple[torch.Tensor, int]] = {}  # what left during backward, and its count of writes then
        self._overlap = overlap
        me = weakref.proxy(self)  # who drops a worker without leaving drops its session
        hooks: list[RemovableHandle] = []
        for name, parameter in params.items() if overlap else ():
            leaves = partial(TorchSession._leaves, me, name)
            hooks.append(parameter.register_post_accumulate_grad_hook(leaves))  # type: ignore[no-untyped-call]
        self._unhook = weakref.finalize(self, _remove, hooks)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameters, where torch.amp.GradScaler looks for them in an optimizer. Raises WrongOrder with overlap."""
        if self._overlap:  # it changes gradients without counting that as a write to them
            raise WrongOrder("a gradient leaves before GradScaler has unscaled it: join with overlap=False")
        return [{"params": list(self._params.values())}]

    def pull(self) -> None:
        """Begin a round: the newest weights into the model, as soon as the bound admits it, and no gradients.

        Raises WorkerEvicted, JobNotFound, ServerLost.
        """
        weights = self.session.pull()
        self._put.clear()
        for parameter in self._params.values():
            parameter.grad = None
        fill(self._params, weights)

    def step(self, loss: float | torch.Tensor | None = None) -> int:
        """Hand over every parameter's `.grad`, by which the aggregator steps; returns the clock it was acknowledged as.

        One without a gradient counts as zeros. `loss`, one number, is shown while the job runs. Raises LayoutMismatch,
        NotFinite, WrongOrder, UsageError for any other loss; after these nothing has changed. Raises what
        `Session.push` raises besides, and may then be called again as that may.
        """
        self._owner.check()
        grads = self._gradients()
        try:
            clock = self.session.push(grads, loss)
        except UsageError:
            raise
        except BaseException:
            self._put.clear()  # the session has dropped it: next time all is pushed
            raise
        self._put.clear()
        return clock

    def leave(self, finished: bool = True) -> None:
        """`Session.leave`, which the end of a with block does as well."""
        self._unhook()
        self.session.leave(finished)

    def _leaves(self, name: str, parameter: torch.Tensor) -> None:
        """Autograd has added up a gradient; in a fork, that of a model which another session trains by now."""
        if not self._owner.is_here:
            return
        if name in self._put:
            raise WrongOrder(
                f"gradient {name!r} has left, and is added to again: join with overlap=False for several backward()"
            )
        grad = _dense(name, parameter.grad)
        try:
            self.session.put(name, grad)
        except UsageError:
            raise
        except BaseException:
            self._put.clear()
            raise
        self._put[name] = grad, grad._version

    def _gradients(self) -> dict[str, Any]:
        """Those that have not left, by name."""
        for name, (grad, written) in self._put.items():
            if self._params[name].grad is not grad or grad._version != written:
                raise WrongOrder(
                    f"gradient {name!r} was changed after it had left: join with overlap=False to clip or unscale"
                )
        if all(p.grad is None for p in self._params.values()):
            raise WrongOrder("no parameter has a gradient: call loss.backward() between pull() and step()")
        return {
            name: np.zeros(tuple(p.shape), DTYPE) if p.grad is None else _dense(name, p.grad)
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
