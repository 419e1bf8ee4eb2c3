"""The forms of items of experience: texts that are the same for items that can be trained on together. Pure.

tokens:int64[1],reward:number,prompt:text      one axis of int64, any number, text
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from urllib.parse import quote, unquote

from kvps.errors import shown, some_of

LONGEST_FORM = 4_000
_SHOWN = 40


def form_of(kinds: Mapping[str, str]) -> str:
    """Return the form of an item: name -> "number", "text", "bytes", or dtype and number of axes, as in "int64[1]".

    It is ASCII without spaces, of at most `LONGEST_FORM` characters: names are percent-encoded as in a URL, and in
    place of a longer text stands its sha256.
    """
    text = ",".join(f"{quote(name, safe='')}:{kind}" for name, kind in kinds.items())
    return text if len(text) <= LONGEST_FORM else f"sha256={hashlib.sha256(text.encode()).hexdigest()}"


def differ(form: str, other: str) -> str:
    """Return in words how the form `other` differs from `form`, for a message; "" if it does not."""
    if form == other:
        return ""
    if ":" not in form or ":" not in other:  # a sha256
        return "they have other names, or other kinds of values"
    wanted, given = _kinds(form), _kinds(other)
    words = {
        "missing": [name for name in wanted if name not in given],
        "unknown": [name for name in given if name not in wanted],
        "other": [
            f"{name} is {given[name]}, not {kind}" for name, kind in wanted.items() if given.get(name, kind) != kind
        ],
    }
    out = [f"{'' if how == 'other' else f'{how} '}{some_of(each)}" for how, each in words.items() if each]
    return "; ".join(out) or f"the names have another order, it is {some_of(list(wanted))}"


def _kinds(form: str) -> dict[str, str]:
    """Return shown name -> kind. The form may come from Redis, and be any text."""
    pairs = [each.partition(":") for each in form[:LONGEST_FORM].split(",")]
    return {shown(unquote(name)): kind[:_SHOWN] for name, _, kind in pairs}
