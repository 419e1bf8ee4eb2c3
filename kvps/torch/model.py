"""Which of a model's parameters are a job's, and how weights get into them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from kvps.arrays.layout import Array
from kvps.errors import LayoutMismatch
from kvps.job import Job

Parameters = dict[str, torch.nn.Parameter]


def parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What a job of this model begins with: name -> float32 tensor, of all parameters that require a gradient.

    The tensors are the model's own memory, on whatever device; of tied ones there is one, under the first of its names.
    Raises LayoutMismatch for a parameter that is not float32, or has no values yet.
    """
    return {name: parameter.detach() for name, parameter in trained(model).items()}


def load(job: Job, model: torch.nn.Module) -> int:
    """Put the newest weights of a job into a model, to evaluate or to save it; returns their version.

    Blocks nobody, and buffers stay as they are. Raises LayoutMismatch, JobNotFound; then nothing was changed.
    """
    wanted = fitting(job, model)
    version, weights = job.snapshot()
    fill(wanted, weights)
    return version


def trained(model: torch.nn.Module) -> Parameters:
    """Name -> parameter, of those that require a gradient, each once. Raises LayoutMismatch as `parameters` does."""
    if not isinstance(model, torch.nn.Module):
        raise LayoutMismatch(f"a model is a torch.nn.Module, not {type(model).__name__}")
    found = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not found:
        raise LayoutMismatch("the model has no parameter that requires a gradient")
    for name, parameter in found.items():
        if is_lazy(parameter):
            raise LayoutMismatch(f"parameter {name!r} has no shape yet: put one batch through the model first")
        if parameter.is_meta:
            raise LayoutMismatch(f"parameter {name!r} is on the device meta and has no values: give it some first")
        if parameter.dtype != torch.float32:
            dtype = str(parameter.dtype).removeprefix("torch.")
            raise LayoutMismatch(
                f"parameter {name!r} is {dtype}: kvps moves float32, call model.float(); autocast computes in less"
            )
    return found


def fitting(job: Job, model: torch.nn.Module) -> Parameters:
    """The model's parameters that are the job's. Raises LayoutMismatch if those are others."""
    found = trained(model)
    job.layout.hosted(found, "parameter")
    return found


def fill(params: Parameters, weights: Mapping[str, Array]) -> None:
    """The one copy of a pull: from where weights were received to where the model has them, on its device."""
    with torch.no_grad():
        for name, parameter in params.items():
            parameter.copy_(torch.from_numpy(np.asarray(_Exposed(weights[name]))))


class _Exposed:
    """A read-only array's memory, without saying that it is read-only: PyTorch knows no such tensors, and warns.

    It is only read."""

    def __init__(self, array: Array) -> None:
        self._array = array  # to outlive what looks at its memory
        self.__array_interface__ = array.__array_interface__ | {"data": (array.ctypes.data, False)}
