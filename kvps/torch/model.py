"""The parameters of a model that a job trains, and the copy of weights into them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from kvps.arrays.layout import Array
from kvps.errors import LayoutMismatch
from kvps.job import Job

Parameters = dict[str, torch.nn.Parameter]
_TRAINED = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes that float32 holds exactly."""


def parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return what a job of this model begins with: name -> float32 tensor, of all parameters that require a gradient.

    The tensors are the model's own memory, on any device, or float32 copies of parameters in bfloat16 or float16; tied
    ones are there once, under the first of their names. Raises LayoutMismatch for a parameter of another dtype, or one
    that has no values yet.
    """
    return {name: parameter.detach().float() for name, parameter in trained(model).items()}


def load(job: Job, model: torch.nn.Module) -> int:
    """Copy the newest weights of a job into a model, to evaluate or save it; return their version.

    Blocks no worker; buffers stay as they are. Raises LayoutMismatch, JobNotFound; nothing was changed then.
    """
    wanted = fitting(job, model)
    version, weights = job.snapshot()
    fill(wanted, weights)
    return version


def trained(model: torch.nn.Module) -> Parameters:
    """Return name -> parameter that requires a gradient, each once. Raises LayoutMismatch as `parameters` does."""
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
        if parameter.dtype not in _TRAINED:
            dtype = str(parameter.dtype).removeprefix("torch.")
            raise LayoutMismatch(
                f"parameter {name!r} is {dtype}: a job's weights are float32, which a model may hold in float32, "
                f"bfloat16 or float16; call model.float()"
            )
    return found


def fitting(job: Job, model: torch.nn.Module) -> Parameters:
    """Return the model's trained parameters. Raises LayoutMismatch if they are not the job's."""
    job.layout.hosted(parameters(model), "parameter")
    return trained(model)


def fill(params: Parameters, weights: Mapping[str, Array]) -> None:
    """Copy received weights into the model's parameters, on their device and in their dtype: the only copy of a
    pull."""
    with torch.no_grad():
        for name, parameter in params.items():
            parameter.copy_(torch.from_numpy(np.asarray(_Exposed(weights[name]))))


class _Exposed:
    """A read-only array's memory, shown as writable because PyTorch warns of read-only arrays; it is only read."""

    def __init__(self, array: Array) -> None:
        self._array = array  # keeps the memory alive for its users
        self.__array_interface__ = array.__array_interface__ | {"data": (array.ctypes.data, False)}
