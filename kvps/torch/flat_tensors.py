"""Moves a model's tensors to and from the flat buffer of its job: small neighbours together, in a few calls of PyTorch
instead of one for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from typing import Any

import torch

from kvps.arrays.dtypes import exposed
from kvps.arrays.layout import Array, Layout
from kvps.arrays.pieces import Parameter
from kvps.arrays.runs import Runs

_MANY = 8
_NOTES_WRITES = False  # whether this PyTorch can be told of many writes at once
with suppress(AttributeError, TypeError):
    torch.autograd.graph.increment_version([torch.zeros(1)])
    _NOTES_WRITES = True
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class FlatTensors:
    """The tensors of a model, by their names in the layout of its job. Those of its runs of several parameters have
    views over one buffer of their own, float32, on their device."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], layout: Layout) -> None:
        runs = [[layout.parameters[n] for n in run] for run in Runs(layout).numbers if len(run) > 1]
        runs = [run for run in runs if _alike([tensors[p.name] for p in run])]
        device = tensors[runs[0][0].name].device if runs else torch.device("cpu")
        together = [p for run in runs if tensors[run[0].name].device == device for p in run]
        self._names = [p.name for p in together]
        self._buffer = torch.empty(sum(p.size for p in together), device=device)
        pins = device.type == "cuda"  # elsewhere such memory may be the device's, which NumPy cannot see
        self._host = self._buffer if device.type == "cpu" else torch.empty(self._buffer.shape, pin_memory=pins)
        self._views = _cut(self._buffer, together)
        on_host = [view.numpy() for view in _cut(self._host, together)]
        self._arrays = dict(zip(self._names, on_host, strict=True))
        self._memory = _Memory()
        self._alone = [p for p in layout.parameters if p.name not in self._arrays]
        self._runs = _places(together)
        self._rows = _rows(self._buffer, together)
        in_rows = {name for names, _ in self._rows for name in names}
        self._others = [
            (name, view) for name, view in zip(self._names, self._views, strict=True) if name not in in_rows
        ]

    def fill(self, tensors: Mapping[str, torch.Tensor], flat: Array) -> None:
        """Copy received weights, (size,) float32, into the model's tensors, on their device and in their dtype."""
        with torch.no_grad():
            memory = self._host.numpy()
            for place, source in self._runs:
                memory[place] = flat[source]
            if self._host is not self._buffer:
                self._buffer.copy_(self._host)
            if self._names:
                self._scatter([tensors[name] for name in self._names])
            for p in self._alone:
                tensors[p.name].copy_(tensor_of(flat[p.start : p.stop].reshape(p.shape)))

    def _scatter(self, tensors: list[torch.Tensor]) -> None:
        """Copy the buffer into small tensors. NumPy copies one in a tenth of PyTorch's time."""
        arrays = self._memory.of(tensors)
        if arrays is None:
            torch._foreach_copy_(tensors, self._views)
            return
        for array, source in zip(arrays, self._arrays.values(), strict=True):
            array[...] = source
        torch.autograd.graph.increment_version(tensors)  # or a backward() through weights of before went unnoticed

    def whole(self, gradients: Mapping[str, torch.Tensor]) -> Array | None:
        """Return the gradients of all parameters end to end, (size,) float32 in host memory, which the next call
        overwrites; None if one is missing, or is of a tensor that is not small."""
        if self._alone or not self._gather(gradients):
            return None
        flat: Array = self._host.numpy()
        return flat

    def gathered(self, gradients: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Return name -> float32 gradient. Those of small tensors are in host memory, which the next call overwrites;
        if some are missing, all are as they were given."""
        if not self._gather(gradients):
            return {name: gradient.detach().float() for name, gradient in gradients.items()}
        large = {name: gradients[name].detach().float() for name in gradients.keys() - self._arrays.keys()}
        return self._arrays | large

    def _gather(self, gradients: Mapping[str, torch.Tensor]) -> bool:
        """Copy the gradients of small tensors end to end into host memory. Return whether they are all there."""
        if not self._names or not gradients.keys() >= self._arrays.keys():
            return False
        with torch.no_grad():
            for names, rows in self._rows:
                torch.cat([gradients[name] for name in names], out=rows)
            if self._others:
                torch._foreach_copy_([view for _, view in self._others], [gradients[name] for name, _ in self._others])
            if self._host is not self._buffer:
                self._host.copy_(self._buffer)
        return True


def tensor_of(array: Array) -> torch.Tensor:
    """Return a tensor on the memory of an array, which may be read-only and is only read."""
    return torch.from_numpy(exposed(array))


class _Memory:
    """The memory of tensors as NumPy arrays; found again when one has got other memory, as by `model.to`."""

    def __init__(self) -> None:
        self._addresses = list[int]()
        self._arrays: list[Array] | None = None

    def of(self, tensors: Sequence[torch.Tensor]) -> list[Array] | None:
        """Return the arrays, which are written to in place; None if NumPy cannot have them."""
        addresses = list(map(torch.Tensor.data_ptr, tensors))
        if addresses != self._addresses:
            plain = all(t.device.type == "cpu" and t.dtype == torch.float32 for t in tensors)
            self._arrays = [t.detach().numpy() for t in tensors] if plain and _NOTES_WRITES else None
            self._addresses = addresses
        return self._arrays


def _alike(tensors: list[torch.Tensor]) -> bool:
    """Return whether they can be copied together: plain tensors on one device."""
    return len({t.device for t in tensors}) == 1 and all(type(t) in _PLAIN for t in tensors)


def _cut(buffer: torch.Tensor, parameters: list[Parameter]) -> list[torch.Tensor]:
    """Return a view for each parameter, one after another."""
    parts = torch.split(buffer, [p.size for p in parameters])
    return [part.view(p.shape) for part, p in zip(parts, parameters, strict=True)]


def _places(parameters: list[Parameter]) -> list[tuple[slice, slice]]:
    """Return where the parameters lie if they are laid end to end, and where in the flat buffer of the job."""
    out, start = list[tuple[slice, slice]](), 0
    for p in parameters:
        if out and out[-1][1].stop == p.start:
            out[-1] = slice(out[-1][0].start, start + p.size), slice(out[-1][1].start, p.stop)
        else:
            out.append((slice(start, start + p.size), slice(p.start, p.stop)))
        start += p.size
    return out


def _rows(buffer: torch.Tensor, parameters: list[Parameter]) -> list[tuple[list[str], torch.Tensor]]:
    """Return many neighbours that differ in their first dimension alone, so that torch.cat, the fastest call, joins
    them: their names and a view of all."""
    out, start = list[tuple[list[str], torch.Tensor]](), 0
    for tail, group in groupby(parameters, lambda p: p.shape[1:] if p.shape else None):
        neighbours = list(group)
        stop = start + sum(p.size for p in neighbours)
        if tail is not None and len(neighbours) >= _MANY:
            rows = buffer[start:stop].view(sum(p.shape[0] for p in neighbours), *tail)
            out.append(([p.name for p in neighbours], rows))
        start = stop
    return out
