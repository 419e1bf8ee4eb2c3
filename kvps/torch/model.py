"""The parameters and buffers of a model that are in a job, and the copy of weights into them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from kvps.arrays.layout import Array
from kvps.arrays.pieces import BUFFER_KINDS, Buffer
from kvps.errors import InvalidSetting, LayoutMismatch, shown
from kvps.job import Job
from kvps.torch.flat_tensors import tensor_of
from kvps.torch.names import in_job, named_buffers, named_parameters, saved_buffers

Parameters = dict[str, torch.nn.Parameter]
_OWN = "own"
_EXACT = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes that float32 holds exactly."""


def parameters(model: torch.nn.Module, buffers: str = _OWN) -> dict[str, torch.Tensor | Buffer]:
    """Return what a job of this model begins with: name -> float32 tensor, of all parameters that require a gradient.

    `buffers` says what becomes of buffers, such as BatchNorm's running statistics: with "own" each worker keeps its
    own. With "average" or "rank0" they are in the job: each version has the average of what the workers that
    contributed to it have, or what the one of the lowest rank has. Then the mapping has a `Buffer` for each that is
    floating-point and in the model's state_dict; all others stay each worker's.

    The tensors are the model's own memory, on any device, or float32 copies of parameters in bfloat16 or float16; tied
    ones are there once, under the first of their names. Raises LayoutMismatch for a parameter or buffer of another
    dtype, or one that has no values yet, and InvalidSetting for another word.
    """
    if buffers not in (_OWN, *BUFFER_KINDS):
        raise InvalidSetting(f"buffers must be one of {', '.join((_OWN, *BUFFER_KINDS))}, not {shown(buffers)}")
    tensors: dict[str, torch.Tensor | Buffer] = dict(_exact(trained(model)))
    if buffers != _OWN:
        tensors |= {name: Buffer(tensor, buffers) for name, tensor in _exact(job_buffers(model)).items()}
    return tensors


def trained(model: torch.nn.Module) -> Parameters:
    """Return name -> parameter that requires a gradient, each once. Raises LayoutMismatch as `parameters` does."""
    trainable = {name: p for name, p in named_parameters(model).items() if p.requires_grad}
    if not trainable:
        raise LayoutMismatch("the model has no parameter that requires a gradient")
    for name, parameter in trainable.items():
        check_tensor(f"parameter {name!r}", parameter)
        if parameter.is_inference():
            raise LayoutMismatch(
                f"parameter {name!r} was made under torch.inference_mode() and cannot be trained: make the model "
                f"outside of it"
            )
    return trainable


def job_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return name -> buffer that a job may have, each once. Raises LayoutMismatch as `parameters` does."""
    buffers = saved_buffers(model)
    for name, buffer in buffers.items():
        check_tensor(f"buffer {name!r}", buffer)
        if buffer.layout is torch.strided and any(
            step == 0 and items > 1 for step, items in zip(buffer.stride(), buffer.shape, strict=True)
        ):
            raise LayoutMismatch(f"buffer {name!r} is expanded, and cannot be written to: register its .contiguous()")
    return buffers


def check_tensor(what: str, tensor: torch.Tensor) -> None:
    """Raise LayoutMismatch for a tensor that no float32 array can hold exactly; `what` is for the message."""
    if is_lazy(tensor):
        raise LayoutMismatch(f"{what} has no shape yet: put one batch through the model first")
    if tensor.is_meta:
        raise LayoutMismatch(f"{what} is on the device meta and has no values: give it some first")
    if tensor.dtype not in _EXACT:
        dtype = str(tensor.dtype).removeprefix("torch.")
        if tensor.is_complex():
            raise LayoutMismatch(
                f"{what} is {dtype}, and a job's weights are float32: make it a parameter of torch.view_as_real(...), "
                f"and use torch.view_as_complex of that in forward"
            )
        raise LayoutMismatch(
            f"{what} is {dtype}: a job's weights are float32, which a model may hold in float32, bfloat16 or float16; "
            f"call model.float()"
        )


class JobBuffers:
    """The buffers of a model that are in its job. `names` are the job's names -> the model's.

    They are looked up each time, because a forward pass may have put another tensor in the place of one.
    """

    def __init__(self, model: torch.nn.Module, names: Mapping[str, str]) -> None:
        self.model = model
        self._names = names

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Name -> the model's own tensor. Raises LayoutMismatch for one that the model has no more."""
        present = named_buffers(self.model, each_name=True) if self._names else {}
        for name in self._names.values():
            if name not in present:
                raise LayoutMismatch(f"the model no longer has the buffer {name!r}, which is in its job: put it back")
        return {of_job: present[name] for of_job, name in self._names.items()}


def fitting(job: Job, model: torch.nn.Module) -> tuple[Parameters, JobBuffers]:
    """Return the model's parameters that are in the job, under the job's names, and its buffers if the job has buffers.
    One that is frozen is among them if the job leaves parameters without a gradient alone: as a worker that comes back
    has it, of a script that froze it half-way. Raises LayoutMismatch if they are not the job's."""
    params, buffers = trained(model), job_buffers(model) if job.layout.buffer_kind else {}
    if job.config.skips_missing:
        names = in_job(everything := named_parameters(model), job.layout.numbers)
        params = {name: everything[name] for name in everything if name in names or name in params}
    names = in_job([*params, *buffers], job.layout.numbers)
    mine = _exact({names.get(name, name): tensor for name, tensor in (params | buffers).items()})
    job.layout.rest(mine, "parameter")
    of_buffers = {names[name]: name for name in buffers}
    return {names[name]: parameter for name, parameter in params.items()}, JobBuffers(model, of_buffers)


def fill(tensors: Mapping[str, torch.Tensor], weights: Mapping[str, Array]) -> None:
    """Copy received weights into the model's parameters and buffers, on their device and in their dtype: the only copy
    of a pull."""
    with torch.no_grad():
        for name, array in weights.items():
            tensors[name].copy_(tensor_of(array))


def _exact(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return them as float32; those that are float32 are the same memory."""
    return {name: tensor.detach().float() for name, tensor in tensors.items()}


def check_steps_all(groups: Iterable[dict[str, Any]], params: Parameters, what: str, cure: str = "") -> None:
    """Raise InvalidSetting unless an optimizer's parameter groups are exactly the trained parameters. `what` is what
    the message calls it, and `cure` what else its user may do."""
    stepped = {id(p) for group in groups for p in group["params"] if p.requires_grad}
    for name, parameter in params.items():
        if parameter.requires_grad and id(parameter) not in stepped:
            raise InvalidSetting(
                f"{what} does not step {name!r}, which requires a gradient: give it that, {cure}or freeze it with "
                f"requires_grad_(False)"
            )
    if len(stepped) > len(params):
        raise InvalidSetting(f"{what} steps tensors that are no parameters of the model: make them parameters")
