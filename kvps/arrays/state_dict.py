"""The bits of a published model: from its arrays into the flat words of its layout, and back into a model. Pure.

    model     {"emb.weight": bfloat16 (5, 3),  "head.weight": the same tensor,  "steps": int64 ()}
    words     [ 30 bytes of emb.weight | 2 zeros | 8 bytes of steps ]        (size,), which say that they are float32
    layout    emb.weight at word 0, steps at word 8, and head.weight tied to emb.weight

`pack` makes words of a model, `unpacked` gives views of them, and `place` brings a model to them where it is.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Hashable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvps.arrays.dtypes import Dtype, all_finite, dtype_of, host_bits, memory_of, tensor_on, word_of
from kvps.arrays.inputs import of_pytorch, state_of
from kvps.arrays.layout import Array, Layout
from kvps.arrays.pieces import Parameter
from kvps.errors import LayoutMismatch, NotFinite, some_of

_PIECE_ITEMS = 1 << 17


def pack(layout: Layout, state: Any, flat: Array) -> None:
    """Write the bits of a model (a module of PyTorch, or name -> array) to `flat`, (size,) float32 in host memory.

    Floats of more bits than the layout's are rounded to the nearest, ties to even; float64 is rounded to float32 first.
    Raises LayoutMismatch for a name that is missing or unknown, for another shape or dtype, and for an array that is no
    longer the one that it was tied to: then `flat` is as it was. Raises NotFinite, which names the array, for NaN or
    Inf; then some of `flat` is written.
    """
    arrays = state_of(state)
    _check_names(layout, arrays, "published")
    for name, p in _named(layout).items():
        own = _checked(p, name, arrays[name])
        if own is not p.stored_as and not own.narrows_to(p.stored_as):
            raise LayoutMismatch(f"array {name!r} is {own.name}, the job's is {p.stored_as.name}: convert it")
    for name, stored in layout.tied.items():
        one, other = arrays[name], arrays[stored]
        if memory_of(one) != memory_of(other) and not _alike(host_bits(one), host_bits(other)):
            raise LayoutMismatch(
                f"array {name!r} differs from {stored!r}, to which it was tied: tie it, or publish anew"
            )
    for p in layout.parameters:
        if p.size:
            flat[p.stop - 1] = 0  # what lies behind the last item
            if not _packed(arrays[p.name], p, p.items_in(flat)):
                raise NotFinite(f"array {p.name!r} has NaN or Inf as {p.stored_as.name}: nothing is published")


def _packed(value: Any, p: Parameter, items: NDArray[Any]) -> bool:
    """Write an array to `items`, (items,) of the layout's dtype; return whether all are finite."""
    dtype = p.stored_as
    if of_pytorch(value) and (value.device.type != "cpu" or not value.is_contiguous() or word_of(value) != dtype.name):
        tensor_on(items, dtype).view(p.shape).copy_(value.detach())  # PyTorch converts, gathers and fetches in one go
        return all_finite(items, dtype)
    source = host_bits(value)
    with np.errstate(all="ignore"):  # what is too large for the dtype is Inf, and found as such
        for start in range(0, items.size, _PIECE_ITEMS):
            piece = items[start : start + _PIECE_ITEMS]
            piece[:] = source[start : start + _PIECE_ITEMS]
            if not all_finite(piece, dtype):  # while it is in the cache
                return False
    return True


def unpacked(layout: Layout, flat: Array) -> dict[str, NDArray[Any]]:
    """Return name -> read-only view into `flat`, (size,) float32, of the array's dtype and shape; of tied names too."""
    views: dict[str, NDArray[Any]] = layout.views(flat)
    return views | {name: views[stored] for name, stored in layout.tied.items()}


def place(layout: Layout, flat: Array, target: Any, names: Collection[str] | None = None) -> None:
    """Bring a model to the bits in `flat`, (size,) float32 in host memory.

    The model is a module of PyTorch, or a dict of tensors on any device or of NumPy arrays. Their memory is written to.
    With `names`, only these arrays are written, and all that are tied to them. The model may hold floats in a wider
    dtype than the job; they are converted exactly. Raises LayoutMismatch for a name that is missing or unknown, for
    another shape or dtype, an array that cannot be written to, and a module whose `state_dict()` gives copies of its
    arrays, and then has written nothing.
    """
    arrays = state_of(target)
    if not isinstance(target, Mapping):
        _check_own(arrays, state_of(target))
    chosen = _named(layout)
    if names is None:
        _check_names(layout, arrays, "the model's")
    else:
        chosen = _tied_to(layout, names, chosen)
        if missing := [name for name in chosen if name not in arrays]:
            raise LayoutMismatch(f"the model's arrays do not fit the job: missing {some_of(missing)}")
    writes = dict[Hashable, tuple[Parameter, Any]]()
    for name, p in chosen.items():
        value = arrays[name]
        own = _checked(p, name, value)
        if own is not p.stored_as and not p.stored_as.widens_to(own):
            raise LayoutMismatch(
                f"array {name!r} is {own.name}, the job's is {p.stored_as.name}: load it into a model of that dtype"
                + (f", or publish it with dtype='{own.name}'" if p.stored_as.narrows_to(own) else "")
            )
        if why := _not_writable(value):
            raise LayoutMismatch(f"array {name!r} {why}")
        before, _ = writes.setdefault(memory_of(value), (p, value))
        if before is not p and not _alike(before.items_in(flat), p.items_in(flat)):
            raise LayoutMismatch(f"arrays {before.name!r} and {name!r} are one in the model, and two in the job")
    with _writing([value for _, value in writes.values()]):
        for p, value in writes.values():
            _write(p, p.items_in(flat), value)


def _write(p: Parameter, items: NDArray[Any], value: Any) -> None:
    """Write an array's items, (items,), to an array of the model."""
    if not of_pytorch(value):
        np.copyto(value, items.reshape(p.shape), casting="unsafe")  # NumPy holds no cast from bfloat16 for safe
    elif items.size:
        value.copy_(tensor_on(items, p.stored_as).view(p.shape))


def _named(layout: Layout) -> dict[str, Parameter]:
    """Return name -> where it is stored, of all names of a published model."""
    stored = {p.name: p for p in layout.parameters}
    return stored | {name: stored[first] for name, first in layout.tied.items()}


def _tied_to(layout: Layout, names: Collection[str], all_: Mapping[str, Parameter]) -> dict[str, Parameter]:
    """Return those of `all_` that are stored where one of `names` is. Raises LayoutMismatch for an unknown name."""
    if unknown := [name for name in names if name not in all_]:
        raise LayoutMismatch(f"the job has no array {some_of(unknown)}")
    wanted = {all_[name].name for name in names}
    return {name: p for name, p in all_.items() if p.name in wanted}


def _check_names(layout: Layout, arrays: Mapping[str, Any], whose: str) -> None:
    wanted = layout.numbers.keys() | layout.tied.keys()
    if arrays.keys() != wanted:
        missing = [name for name in [*layout.numbers, *layout.tied] if name not in arrays]
        unknown = [str(name) for name in arrays if name not in wanted]
        words = [f"{how} {some_of(each)}" for how, each in (("missing", missing), ("unknown", unknown)) if each]
        raise LayoutMismatch(f"{whose} arrays do not fit the job: {'; '.join(words)}")


def _checked(p: Parameter, name: str, value: Any) -> Dtype:
    """Return the dtype of an array. Raises LayoutMismatch unless it is an array, of the shape of `p`."""
    dtype = dtype_of(value, name)
    if (shape := tuple(map(int, value.shape))) != p.shape:
        raise LayoutMismatch(f"array {name!r} has shape {shape}, the job's has {p.shape}")
    return dtype


def _check_own(arrays: Mapping[str, Any], again: Mapping[str, Any]) -> None:
    """Raise LayoutMismatch if a module's state dict has other memory each time: what is written there is lost."""
    for name, value in arrays.items():
        if of_pytorch(value) and value.numel() and memory_of(value) != memory_of(again.get(name)):
            raise LayoutMismatch(
                f"array {name!r} is a copy, which the model's state_dict() makes: give state = model.state_dict() in "
                f"its place, and call model.load_state_dict(state) after that"
            )


def _not_writable(value: Any) -> str:
    """Return why an array cannot be written to; "" if it can be."""
    if of_pytorch(value):
        spread = any(step == 0 and items > 1 for step, items in zip(value.stride(), value.shape, strict=True))
        return "is expanded, and cannot be written to: give its .contiguous()" if spread else ""
    if not isinstance(value, np.ndarray):
        return f"is {type(value).__name__}, which cannot be written to: give one of NumPy or PyTorch"
    return "" if value.flags.writeable else "is read-only: give a copy"


def _alike(one: NDArray[Any], other: NDArray[Any]) -> bool:
    """Return whether two contiguous arrays have the same bits."""
    return one.dtype == other.dtype and np.array_equal(one.view(np.uint8), other.view(np.uint8))


def _writing(values: Collection[Any]) -> AbstractContextManager[Any]:
    """Return the context in which tensors may be written to where they are."""
    tensors = [value for value in values if of_pytorch(value)]
    if not tensors:
        return nullcontext()
    torch = importlib.import_module("torch")
    made_in_inference = any(tensor.is_inference() for tensor in tensors)
    context: AbstractContextManager[Any] = torch.inference_mode() if made_in_inference else torch.no_grad()
    return context
