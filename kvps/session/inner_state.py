"""The state of a worker's inner optimizer as bytes: named arrays in the format of safetensors, which runs no code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from safetensors import SafetensorError

from kvps.errors import CorruptData, UsageError

State = Mapping[str, NDArray[Any]]
_DTYPES = (np.dtype(np.float32), np.dtype(np.float64), np.dtype(np.int64))


def to_bytes(state: State) -> bytes:
    """Return the arrays, which are float32, float64 or int64, as bytes. Raises UsageError for any other."""
    for name, array in state.items():
        if array.dtype not in _DTYPES:
            raise UsageError(f"the state {name!r} is {array.dtype}: give float32, float64 or int64")
    data: bytes = safetensors.numpy.save({name: np.asarray(array, order="C") for name, array in state.items()})
    return data


def from_bytes(data: bytes, what: str) -> dict[str, NDArray[Any]]:
    """Return the arrays that `to_bytes` made bytes of. Raises CorruptData for any other, in which `what` names them."""
    try:
        state = safetensors.numpy.load(data)
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise CorruptData(f"{what} is no state of an optimizer: {error}") from None
    for name, array in state.items():
        if array.dtype not in _DTYPES:
            raise CorruptData(f"{what} holds {name!r} as {array.dtype}, and kvps stores float32, float64 and int64")
    return state
