"""Checks of what users hand over: a number, an array or a mapping of arrays, and messages for anything else. Pure.

This module imports no framework: it recognizes arrays of PyTorch, SciPy and others by their attributes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from operator import attrgetter, eq
from typing import Any

import numpy as np

from kvps.errors import LayoutMismatch, UsageError
from kvps.parsing import MOST_TEXT

_NAMED = 5  # items of a container that a message names
_FLOAT32 = np.dtype(np.float32)
_AS_ARRAY = "as by np.asarray(..., np.float32)"
# A readable array has one of these. `detach` is first: a tensor that requires a gradient raises for the others.
_READABLE = ("detach", "__array__", "__array_interface__", "__cuda_array_interface__", "__dlpack__")


def one_number(value: Any, what: str) -> float:
    """Return `value` as a float: a Python or NumPy number, or an array or tensor with one item, on any device.

    NaN and Inf are numbers; text, truth values, complex numbers and masked items are not. `what` is for the message.
    Raises UsageError.
    """
    try:
        item = value.item() if hasattr(value, "item") else value
        if isinstance(item, str | bytes | bool) or np.ma.is_masked(value):  # float() would accept these
            raise TypeError("no number")
        return float(item)
    except Exception as error:  # a framework's array may raise any error
        raise UsageError(f"{what} must be one number, not {in_words(value)}") from error


def check_mapping(value: Any, what: str) -> None:
    """Raise LayoutMismatch unless `value` is a mapping; `what` ("parameters", "gradients") is for the message."""
    if isinstance(value, Mapping):
        return
    if hasattr(value, "named_parameters") or hasattr(value, "gi_frame"):  # a module, or what its parameters() returns
        cure = "kvps.torch.parameters(model) makes one of a model, and kvps.torch.join pushes a model's gradients"
    elif isinstance(value, str) or hasattr(value, "__fspath__"):
        cure = "np.load(...) reads such a mapping from an .npz file"
    else:
        cure = "give each array a name, as in {'W': array}"
    raise LayoutMismatch(f"{what} must be a mapping of names to float32 arrays, not {in_words(value)}: {cure}")


def check_name(name: object) -> None:
    """Raise LayoutMismatch unless an array may have this name."""
    if not isinstance(name, str) or not name or len(name) > MOST_TEXT or not name.isprintable():
        raise LayoutMismatch(f"parameter names must be printable strings of 1 to {MOST_TEXT} characters, not {name!r}")
    if name == "__metadata__":
        raise LayoutMismatch("no parameter may be named '__metadata__': that is no tensor in a checkpoint")


def state_of(model: Any) -> dict[str, Any]:
    """Return name -> array of a model: a module of PyTorch has a `state_dict()`, any other is a mapping already.

    The names are the state dict's own. Raises LayoutMismatch for anything else.
    """
    state = model.state_dict() if callable(getattr(model, "state_dict", None)) else model
    if not isinstance(state, Mapping):
        raise LayoutMismatch(
            f"a model must be a module of PyTorch or a mapping of names to arrays, not {in_words(model)}"
        )
    return dict(state)  # of a mapping that makes an array anew each time, as that of an .npz file does, one is kept


def shape_of(value: Any, name: str, what: str) -> tuple[int, ...]:
    """Return the shape of a float32 array that loses nothing when only its items are moved.

    `name` and `what` ("parameter", "gradient") are for the message. Raises LayoutMismatch.
    """
    shape: tuple[int, ...]
    if type(value) is np.ndarray and value.dtype == _FLOAT32:  # nearly always, and in each push
        shape = value.shape
        return shape
    if wrong := wrong_kind(value, name) or _wrong_dtype(value, name):
        raise LayoutMismatch(f"{what} {name!r} is {wrong}")
    return tuple(int(n) for n in value.shape)


def all_fit(arrays: Collection[Any], shapes: Iterable[tuple[int, ...]]) -> bool:
    """Return whether all are float32 arrays of NumPy of these shapes, as in nearly every push. `shape_of` says of one
    what is wrong, and takes longer."""
    if not set(map(type, arrays)) <= {np.ndarray} or [a.dtype for a in arrays].count(_FLOAT32) != len(arrays):
        return False
    return all(map(eq, map(attrgetter("shape"), arrays), shapes))  # without lists of tuples, for the garbage collector


def of_pytorch(value: Any) -> bool:
    """Return whether the value is a tensor or parameter of PyTorch."""
    return any(kind.__module__.partition(".")[0] == "torch" for kind in type(value).__mro__)


def wrong_kind(value: Any, name: str, how: str = f", {_AS_ARRAY}") -> str:
    """Return what the value is instead of an array, and the cure; "" if it is an array. `how` says how to make one."""
    if isinstance(value, Mapping):
        return f"{in_words(value)}: give each array in it a name of its own, as in '{name}.{next(iter(value), 'x')}'"
    if isinstance(value, np.ma.MaskedArray):
        return "a masked array, and would lose its mask: give it .filled(0)"
    if hasattr(value, "get_mask"):
        return "a masked tensor, and would lose its mask: give it .to_tensor(0)"
    if str(getattr(value, "layout", "")).startswith(("torch.sparse", "torch.jagged")):
        return "sparse: kvps moves whole arrays, give its .to_dense()"
    if getattr(value, "is_meta", False):
        return "on the device meta and has no values: give it some first"
    if any(each.__name__ == "UninitializedTensorMixin" for each in type(value).__mro__):  # it raises for `shape`
        return "without a shape yet: put one batch through the model first"
    if all(hasattr(value, attribute) for attribute in ("dtype", "shape")):
        if any(hasattr(value, attribute) for attribute in _READABLE):
            return ""
        if hasattr(value, "toarray"):
            return "sparse: kvps moves whole arrays, give its .toarray()"
    return f"{in_words(value)}: give an array{how}"


def _wrong_dtype(array: Any, name: str) -> str:
    """Return the dtype that the array has instead of float32, and the cure; "" if it has float32."""
    dtype = str(array.dtype)
    if dtype in ("float32", "torch.float32"):
        return ""
    if dtype.startswith("torch.complex"):
        return f"{dtype.removeprefix('torch.')}: kvps moves float32, give its torch.view_as_real(...)"
    if dtype.startswith("torch."):
        return f"{dtype.removeprefix('torch.')}: kvps moves float32, convert it with .float()"
    if not isinstance(array.dtype, np.dtype):
        return f"{type(array).__name__} of {dtype}: give an array, {_AS_ARRAY}"
    if array.dtype.names:
        fields = ", ".join(array.dtype.names)
        first = array.dtype.names[0]
        return f"an array of records: give each of its fields ({fields}) a name of its own, as in '{name}.{first}'"
    if array.dtype.kind == "c":
        return f"{dtype}: kvps moves float32, give its .real and .imag, each under a name of its own"
    if array.dtype.kind in "OSUMm":
        return f"an array of {dtype.lstrip('|')}: give one of numbers, {_AS_ARRAY}"
    return f"{dtype}: kvps moves float32, convert it with .astype('float32')"


def in_words(value: Any) -> str:
    """Return a few words that describe a value: its type, and for a container its items."""
    kind = type(value).__name__
    if isinstance(value, Mapping):
        return f"a {kind} with {_listed(map(repr, value)) or 'nothing in it'}"
    if isinstance(value, tuple | list):
        return f"a {kind} of {_listed(type(item).__name__ for item in value) or 'nothing'}"
    if hasattr(value, "shape"):
        return f"{kind} of shape {tuple(value.shape)}"
    return kind if value is not None else "None"


def _listed(words: Iterable[str]) -> str:
    first = [word for _, word in zip(range(_NAMED + 1), words, strict=False)]
    return ", ".join(first[:_NAMED] + ["..."] * (len(first) > _NAMED))


def check_flat(flat: object, size: int) -> None:
    """Raise LayoutMismatch unless `flat` is an array of all gradients end to end, (size,) float32 in host memory."""
    if not isinstance(flat, np.ndarray) or (flat.dtype, flat.shape) != (np.float32, (size,)):
        given = in_words(flat) + (f" and dtype {flat.dtype}" if isinstance(flat, np.ndarray) else "")
        raise LayoutMismatch(f"all gradients are an array of shape ({size},) and dtype float32, not {given}")
    if not flat.flags.c_contiguous:
        raise LayoutMismatch("all gradients are one array without gaps: give numpy.ascontiguousarray of it")
