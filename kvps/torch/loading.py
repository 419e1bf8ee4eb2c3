"""Loads a job's weights into a model that need not be one that trains: frozen, wrapped, or with more or less in it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from weakref import WeakSet

import torch

from kvps.arrays.layout import Array, Layout
from kvps.errors import InvalidSetting, LayoutMismatch, shown, some_of
from kvps.job import Job
from kvps.parsing import names_like
from kvps.torch.model import check_tensor, fill, job_buffers
from kvps.torch.names import in_job, named_parameters, saved_buffers, unwrapped
from kvps.torch.weight_watch import loaded

log = logging.getLogger("kvps.torch")

Places = dict[str, torch.Tensor]
_buffers_known = WeakSet[torch.nn.Module]()
"""Models whose own buffers are what their user means, or knows to differ."""


class Loaded(int):
    """The version that `load` has copied, and what it has left out, named as `Module.load_state_dict` does.

    missing_keys     the model's parameters, and buffers, if the job has buffers, that the job does not have
    unexpected_keys  the job's parameters that the model does not have
    """

    missing_keys: list[str]
    unexpected_keys: list[str]


def load(
    job: Job, model: torch.nn.Module, strict: bool = True, prefix: str = "", only: str | Iterable[str] | None = None
) -> Loaded:
    """Copy the newest weights of a job into a model, to evaluate or save it, and buffers, if the job has them; return
    their version, an int with the names of what was left out.

    Parameters are found by their names, whether they require a gradient or not. `strict` says that the model must have
    all of the job's parameters, and the job all of the model's that require a gradient; without it, what both have is
    copied. With a `prefix`, only those of the job's parameters count that begin with it, and the model has them without
    it: ``load(job, policy, prefix="policy.")`` if the job trains a module whose attribute is that policy. `only` are
    names of the model's parameters, or patterns of them with ``*``, ``?`` and ``[...]``: no others are copied.

    Blocks no worker; other buffers stay as they are, and a warning says so once of each model that no worker of this
    process trains. Raises LayoutMismatch, JobNotFound, and InvalidSetting for a prefix or a pattern that no parameter
    of the job has; nothing was changed then.
    """
    places, wanted = _places(model), _wanted(job.layout, prefix)
    own: Places = {**named_parameters(model)}
    if job.layout.buffer_kind:
        own |= job_buffers(model)
    if only is not None:
        patterns = [only] if isinstance(only, str) else list(only)
        wanted = {name: wanted[name] for name in _like(patterns, wanted)}
        own = {name: own[name] for pattern in patterns for name in names_like(pattern, own)}
    found = in_job(places, wanted)
    taken = {id(places[name]) for name in found}
    missing = [name for name, tensor in own.items() if id(tensor) not in taken]
    unexpected = [name for name in wanted if name not in set(found.values())]
    frozen = {name for name, parameter in named_parameters(model).items() if not parameter.requires_grad}
    lacking = [name for name in missing if name not in frozen]
    if not found or (strict and (lacking or unexpected)):
        raise LayoutMismatch(_differences(lacking or missing, unexpected, bool(found)))
    tensors = _checked(job.layout, places, {name: wanted[other] for name, other in found.items()})
    if not job.layout.buffer_kind:
        _warn_of_buffers(job, model)
    version, weights = job.snapshot()
    _fill(tensors, weights)
    loaded(job.id, tensors.values())
    result = Loaded(version)
    result.missing_keys, result.unexpected_keys = missing, unexpected
    return result


def fill_with(job: Job, model: torch.nn.Module, weights: Mapping[str, Array]) -> None:
    """Copy the weights of one version into a model that has all of them, as `load` does. Raises LayoutMismatch."""
    places = _places(model)
    found = in_job(places, _wanted(job.layout, ""))
    if unexpected := [name for name in weights if name not in set(found.values())]:
        raise LayoutMismatch(_differences([], unexpected, bool(found)))
    tensors = _checked(job.layout, places, found)
    if not job.layout.buffer_kind:
        _warn_of_buffers(job, model)
    _fill(tensors, weights)


def _fill(tensors: Places, weights: Mapping[str, Array]) -> None:
    with torch.inference_mode(any(tensor.is_inference() for tensor in tensors.values())):
        fill(tensors, {name: weights[name] for name in tensors})


def trains_here(model: torch.nn.Module) -> None:
    """Note that a worker of this process trains the model: its buffers are of batches that it has seen."""
    _buffers_known.add(unwrapped(model))


def _warn_of_buffers(job: Job, model: torch.nn.Module) -> None:
    """Say once that a model has floating-point buffers that the job does not have."""
    if unwrapped(model) in _buffers_known:
        return
    _buffers_known.add(unwrapped(model))
    if own := list(saved_buffers(model)):
        log.warning(
            "the model's buffers (%s) are not in job %r: they stay as they are, and an evaluation uses those. Have the "
            'job keep them with kvps.torch.parameters(model, buffers="average"), or compute BatchNorm\'s anew with '
            "torch.optim.swa_utils.update_bn",
            some_of(own),
            job.name,
        )


def _places(model: torch.nn.Module) -> Places:
    """Return name -> tensor that a job may have, tied ones under each of their names."""
    return {**named_parameters(model, each_name=True), **saved_buffers(model, each_name=True)}


def _wanted(layout: Layout, prefix: str) -> dict[str, str]:
    """Return name without the prefix -> the job's name, of those that have the prefix. Raises InvalidSetting."""
    wanted = {p.name[len(prefix) :]: p.name for p in layout.parameters if p.name.startswith(prefix)}
    if not wanted:
        raise InvalidSetting(f"no parameter of the job begins with the prefix {shown(prefix)}")
    return wanted


def _like(patterns: list[str], wanted: dict[str, str]) -> list[str]:
    """Return the names that match one of the patterns. Raises InvalidSetting for a pattern that matches none."""
    names = dict[str, None]()
    for pattern in patterns:
        matched = names_like(pattern, wanted)
        if not matched:
            raise InvalidSetting(f"only has {shown(pattern)}, which no parameter of the job is named")
        names |= dict.fromkeys(matched)
    return list(names)


def _differences(missing: list[str], unexpected: list[str], some: bool) -> str:
    wrong = {"the job lacks": missing, "the model lacks": unexpected}
    differences = "; ".join(f"{how} {some_of(names)}" for how, names in wrong.items() if names)
    cure = "strict=False loads what both have, only= some of it, prefix= a module of what the job trains"
    return f"the model does not fit the job: {differences}: {cure if some else 'no name is in both, see prefix='}"


def _checked(layout: Layout, places: Places, names: dict[str, str]) -> Places:
    """Return the job's name -> tensor, of these names, model's -> job's. Raises LayoutMismatch for a tensor that cannot
    hold its array, or is to hold two."""
    tensors, holds = Places(), dict[int, str]()
    for name, other in names.items():
        tensor, parameter = places[name], layout.parameters[layout.numbers[other]]
        check_tensor(f"{'buffer' if parameter.buffer else 'parameter'} {name!r}", tensor)
        layout.check_shape(layout.numbers[other], tuple(tensor.shape), "parameter")
        if (same := holds.setdefault(id(tensor), other)) != other:
            raise LayoutMismatch(
                f"{same!r} and {other!r} are one tensor in the model, and two in the job: untie them, or leave one out "
                f"with only="
            )
        tensors[other] = tensor
    return tensors
