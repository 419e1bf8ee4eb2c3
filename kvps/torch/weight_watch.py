"""Notices that a script has changed the weights in its model: they are the job's, and the next pull undoes the change.

PyTorch counts the writes to a tensor, and kvps notes the counts after its own. It does not count writes through `.data`
or a NumPy array on the same memory. So each check also compares one 64th of the weights, the next one each time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import attrgetter
from weakref import WeakSet

import numpy as np
import torch

from kvps.arrays.layout import Array, Layout
from kvps.errors import UsageError, some_of
from kvps.torch.flat_tensors import tensor_of
from kvps.torch.model import Parameters

TURNS = 64
_version = attrgetter("_version")
_watches = WeakSet["WeightWatch"]()


class WeightWatch:
    """The parameters of a model as their worker has left them: with the job's weights, or after its own local steps.

    Whoever changes weights and puts the same ones back, as for an evaluation of their average, has changed nothing.
    """

    def __init__(self, params: Parameters, layout: Layout, job: str) -> None:
        """`job` is the job's id."""
        self._job = job
        self._tensors = list(params.values())
        self._of_job = [layout.parameters[layout.numbers[name]] for name in params]
        self._stretches = _stretches([p.size for p in self._of_job])
        self._turn = 0
        self._weights: Array | Mapping[str, torch.Tensor] | None = None
        self._versions = [0] * len(params)
        self._addresses = [0] * len(params)  # as of no memory: the first check compares everything
        self._arrays = dict[int, Array]()
        _watches.add(self)

    def _marks(self) -> tuple[list[int], list[int]]:
        return list(map(_version, self._tensors)), list(map(torch.Tensor.data_ptr, self._tensors))

    def note(self, weights: Array | Mapping[str, torch.Tensor]) -> None:
        """Note what the model has now: the job's weights, (size,) float32, which are not overwritten before `forget`;
        or name -> float32 tensor."""
        self._weights = weights
        self._versions = list(map(_version, self._tensors))

    def forget(self) -> None:
        """Take whatever the model has for what it should have, until `note`."""
        self._weights = None

    def check(self) -> None:
        """Raise UsageError unless the model has what was noted."""
        if self._weights is None:
            return
        versions, addresses = self._marks()
        if versions != self._versions or addresses != self._addresses:
            before = zip(self._versions, self._addresses, strict=True)
            now = zip(versions, addresses, strict=True)
            moved = [number for number, marks in enumerate(zip(before, now, strict=True)) if marks[0] != marks[1]]
            self._arrays.clear()
            _refuse(self._differing(moved))
            self._versions, self._addresses = versions, addresses
        self._turn = (self._turn + 1) % len(self._stretches)
        if not all(self._is_same(*stretch) for stretch in self._stretches[self._turn]):
            _refuse(self.changed())

    def changed(self) -> list[str]:
        """Return the names of all parameters that are not as they were noted."""
        self._arrays.clear()
        return [] if self._weights is None else self._differing(range(len(self._tensors)))

    def _differing(self, numbers: Iterable[int]) -> list[str]:
        return [p.name for n in numbers if not self._is_same(n, 0, (p := self._of_job[n]).size)]

    def _is_same(self, number: int, start: int, stop: int) -> bool:
        """Return whether some items of a parameter are as they were noted."""
        assert self._weights is not None
        p, array = self._of_job[number], self._arrays.get(number)
        if not isinstance(self._weights, np.ndarray):
            if p.name not in self._weights:
                return True
            expected = self._weights[p.name].reshape(-1)[start:stop]
        else:
            flat = self._weights[p.start + start : p.start + stop]
            if array is not None and array[start:stop].tobytes() == flat.tobytes():
                return True
            expected = tensor_of(flat)
        tensor = self._tensors[number].detach()
        if tensor.is_meta:  # its memory was given up
            return True
        if tensor.shape != p.shape:
            return False
        now = tensor.reshape(-1)
        if now.device.type == "cpu" and now.dtype == torch.float32 and now.data_ptr() == tensor.data_ptr():
            self._arrays[number] = now.numpy()
        now, expected = now[start:stop], expected.to(now.device, now.dtype)
        return torch.equal(now, expected) or bool(((now == expected) | (now.isnan() & expected.isnan())).all())


def loaded(job: str, tensors: Iterable[torch.Tensor]) -> None:
    """Note that weights of a job, which has this id, were loaded into tensors: its workers take them for their own."""
    ids = set(map(id, tensors))
    for watch in list(_watches):
        if watch._job == job and not ids.isdisjoint(map(id, watch._tensors)):
            watch.forget()


def _stretches(sizes: list[int]) -> list[list[tuple[int, int, int]]]:
    """Return, for each turn, which parameters to compare, from which item to which: together, each item once."""
    length = max(1, -(-sum(sizes) // TURNS))
    turns, left = [list[tuple[int, int, int]]()], length
    for number, size in enumerate(sizes):
        start = 0
        while start < size:
            stop = min(size, start + left)
            turns[-1].append((number, start, stop))
            left -= stop - start
            start = stop
            if not left:
                turns.append([])
                left = length
    return turns


def _refuse(names: list[str]) -> None:
    if names:
        raise UsageError(
            f"changed outside of step(), and not in the job: {some_of(names)}; load weights before Optimizer(...) or "
            f"create_job, and clip or project inside the model, as torch.nn.utils.parametrize does"
        )
