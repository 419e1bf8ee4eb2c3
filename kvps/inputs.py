"""What users hand over: which values are one number, and a few words for any other value. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from kvps.errors import UsageError


def one_number(value: Any, what: str) -> float:
    """`value` as a float: a Python or NumPy number, or an array or tensor with one item, on any device.

    NaN and Inf are numbers; text, truth values, complex numbers and masked items are not. `what` is for the message.
    Raises UsageError.
    """
    try:
        item = value.item() if hasattr(value, "item") else value
        if isinstance(item, str | bytes | bool) or np.ma.is_masked(value):  # float() takes these too
            raise TypeError("no number")
        return float(item)
    except Exception as error:  # what else a framework's array may raise is not ours to know
        raise UsageError(f"{what} must be one number, not {in_words(value)}") from error


def in_words(value: Any) -> str:
    """What a value is, in a few words: its type, and of a container what is in it."""
    kind = type(value).__name__
    if isinstance(value, Mapping):
        return f"a {kind} with {', '.join(map(repr, value)) or 'nothing in it'}"
    if isinstance(value, tuple | list):
        return f"a {kind} of {', '.join(type(item).__name__ for item in value) or 'nothing'}"
    if hasattr(value, "shape"):
        return f"{kind} of shape {tuple(value.shape)}"
    return kind if value is not None else "None"
