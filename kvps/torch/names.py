"""The names that a job has for a model's parameters and buffers: those of the model itself, whatever wraps it.

torch.compile, DataParallel and DistributedDataParallel put a module around a model, and its name before the names in
it. So a compiled model has `_orig_mod.0.weight` where the model has `0.weight`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import nn

from kvps.errors import LayoutMismatch

_COMPILED = "_orig_mod"
_PARALLEL = (nn.DataParallel, nn.parallel.DistributedDataParallel)
_WRAPPERS = (f"{_COMPILED}.", "module.")


def unwrapped(model: object) -> nn.Module:
    """Return the model in all wrappers. Raises LayoutMismatch for what is no model."""
    if not isinstance(model, nn.Module):
        raise LayoutMismatch(f"a model is a torch.nn.Module, not {type(model).__name__}")
    while True:
        inner = model.module if isinstance(model, _PARALLEL) else getattr(model, _COMPILED, None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def named_parameters(model: nn.Module, each_name: bool = False) -> dict[str, nn.Parameter]:
    """Return name -> parameter: tied ones once, under the first of their names, or under `each_name`."""
    named = unwrapped(model).named_parameters(remove_duplicate=not each_name)
    return {_own(name): parameter for name, parameter in named}


def named_buffers(model: nn.Module, each_name: bool = False) -> dict[str, torch.Tensor]:
    """Return name -> buffer, as `named_parameters` does."""
    named = unwrapped(model).named_buffers(remove_duplicate=not each_name)
    return {_own(name): buffer for name, buffer in named}


def saved_buffers(model: nn.Module, each_name: bool = False) -> dict[str, torch.Tensor]:
    """Return name -> floating-point buffer that is in the model's state_dict, as `named_parameters` does. A model makes
    the others anew (masks, with infinite values in them), or counts with them."""
    floats = {name: b for name, b in named_buffers(model, each_name).items() if b.is_floating_point()}
    saved = set(map(_own, unwrapped(model).state_dict(keep_vars=True))) if floats else ()
    return {name: buffer for name, buffer in floats.items() if name in saved}


def in_job(names: Iterable[str], of_job: Collection[str]) -> dict[str, str]:
    """Return, for each of a model's names that a job has, the job's name. They may differ by wrappers: a job may have
    been created with other names than `kvps.torch.parameters` gives."""
    names = list(names)
    found = {name: name for name in names if name in of_job}
    if len(found) < len(names):
        rest = {_bare(name): name for name in of_job if name not in found}
        for name in names:
            if name not in found and (other := rest.pop(_bare(name), None)) is not None:
                found[name] = other
    return found


def _own(name: str) -> str:
    """Return a name without those of compiled modules in the model."""
    return name.replace(f"{_COMPILED}.", "") if _COMPILED in name else name


def _bare(name: str) -> str:
    name = _own(name)
    while name.startswith(_WRAPPERS):
        name = name.partition(".")[2]
    return name
