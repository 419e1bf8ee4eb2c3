"""Local steps of a task's worker: an inner optimizer steps on batch after batch, and the worker pushes how far it came.

The pseudo-gradient is the weights that were pulled minus the weights now (arXiv 2311.08105). All arithmetic on weights
is that of `kvps.optim.update_rules`, so a replay gets the same bits from the same gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvps.arrays.digest import finite
from kvps.arrays.layout import DTYPE, Layout
from kvps.config import JobConfig
from kvps.device.base import Device, flattened
from kvps.errors import CorruptData, NotFinite
from kvps.optim import update_rules
from kvps_workers.task import Task

Batch = tuple[Any, ...]
_TAKEN = "taken"


class LocalSteps:
    """The weights and the inner optimizer of one worker, (size,) float32 arrays on its device. The optimizer's state
    begins as zeros, and goes on from round to round; with fragments so do the weights. In rounds of units it begins
    anew in each unit, so that a unit does not depend on those that the same worker did before."""

    def __init__(self, task: Task, config: JobConfig, layout: Layout, device: Device) -> None:
        self._task = task
        self._config = config
        self._layout = layout
        self._device = device
        self._weights, self._next, self._gradient, self._pulled = (self._zeros() for _ in range(4))
        slots = config.inner_optimizer.slots
        self._state = {slot: self._zeros() for slot in slots}
        self._next_state = {slot: self._zeros() for slot in slots}
        self._taken = 0  # steps since the state was zeros
        self._before: tuple[int, dict[str, Any]] = (0, {})  # the last contribution's number, and the state before it

    def _zeros(self) -> Any:
        return self._device.xp.zeros(self._layout.size, DTYPE)

    def pseudo_gradient(
        self, params: Mapping[str, Any], batches: Iterable[tuple[float, Batch]], accepted: int, part: str = ""
    ) -> tuple[float, dict[str, Any]]:
        """Take a step on each batch, beginning with the weights `params`. Return the mean loss and the pseudo-gradient
        of a part of the model ("" is all of it). `params` may be those of a part too: the rest are the worker's own.

        `accepted` is how many contributions of the session were accepted before: one that was not accepted leaves no
        trace in the optimizer's state. Each batch comes with the progress at which a schedule gives its learning rate.
        Mappings are name -> float32 array; the one returned is valid until the next call. Raises TaskFailed,
        LayoutMismatch and NotFinite.
        """
        xp = self._device.xp
        self._set(self._anew() if self._config.unit_rounds else self._after(accepted))
        self._before = accepted + 1, self._copied()  # at once: an interrupt finds the one state or the other
        for name, array in params.items():
            p = self._layout.parameters[self._layout.numbers[name]]
            self._pulled[p.start : p.stop] = self._weights[p.start : p.stop] = self._device.flat(array)
        losses = []
        for progress, batch in batches:
            loss, grads = self._task.gradient(self._shown(), batch, xp)
            losses.append(loss)
            if self._take(grads):
                self._step(self._config.inner_optimizer.lr_at(progress))
        self._device.exact.subtract(self._pulled, self._weights, out=self._gradient)
        whole = self._layout.cut(self._gradient)
        return sum(losses) / len(losses), {p.name: whole[p.name] for p in self._layout.parameters_in(part)}

    def state(self, accepted: int) -> dict[str, NDArray[Any]]:
        """Return the optimizer's state in host memory after so many accepted contributions: all that were computed, or
        all but the last. Slot -> (size,) float32, and "taken", the steps since they were zeros; {} without any."""
        state = self._after(accepted)
        hosted = {name: flattened(array) for name, array in state.items() if name != _TAKEN}
        return {**hosted, _TAKEN: np.array(state[_TAKEN], np.int64)} if hosted and state[_TAKEN] else {}

    def _after(self, accepted: int) -> dict[str, Any]:
        number, before = self._before
        return before if number > accepted else self._copied()

    def _anew(self) -> dict[str, Any]:
        return {_TAKEN: 0} | {slot: self._zeros() for slot in self._state}

    def _set(self, state: Mapping[str, Any]) -> None:
        self._taken = state[_TAKEN]
        self._state = {slot: state[slot].copy() for slot in self._state}

    def _copied(self) -> dict[str, Any]:
        return {_TAKEN: self._taken} | {slot: array.copy() for slot, array in self._state.items()}

    def restore(self, state: Mapping[str, NDArray[Any]]) -> bool:
        """Go on from what `state` returned. Return False for {}. Raises CorruptData if it is another model's."""
        if not state:
            return False
        shapes = {_TAKEN: ((), np.int64)} | dict.fromkeys(self._state, ((self._layout.size,), DTYPE))
        if {name: (array.shape, array.dtype) for name, array in state.items()} != shapes or state[_TAKEN] < 1:
            raise CorruptData("the stored state of the inner optimizer fits another optimizer or model")
        self._taken = int(state[_TAKEN])
        self._state = {slot: self._device.upload(state[slot].copy()) for slot in self._state}
        return True

    def _shown(self) -> dict[str, Any]:
        """Return the weights for the task, which may only read them."""
        return (self._layout.views if self._device.xp is np else self._layout.cut)(self._weights)

    def _take(self, grads: Mapping[str, Any]) -> bool:
        """Copy a gradient, which a step overwrites. Return whether it counts; raises NotFinite unless the job skips it.
        One with NaN or Inf would stay in the optimizer's state for good."""
        for number, grad in self._layout.rest(grads, "gradient").items():
            p = self._layout.parameters[number]
            self._gradient[p.start : p.stop] = self._device.flat(grad)
        counts = finite(self._gradient)
        if not counts and self._config.nonfinite == "reject":
            raise NotFinite(
                "the gradient of a local step holds NaN or Inf: lower the inner learning rate, or create the job with "
                "nonfinite='skip' to leave out such steps"
            )
        return counts

    def _step(self, lr: float) -> None:
        self._taken += 1
        update_rules.update(
            self._config.inner_optimizer,
            lr,
            self._taken,
            self._weights,
            self._gradient,
            self._state,
            self._next,
            self._next_state,
            self._device.exact,
        )
        self._weights, self._next = self._next, self._weights
        self._state, self._next_state = self._next_state, self._state
