"""The states of workers as the hash `states` has them: what each worker's user keeps beside the weights. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from kvps.errors import CorruptData, InvalidSetting, UsageError, shown
from kvps.parsing import from_json

MOST_BYTES = 64 << 10
"""The most bytes of a state as JSON."""
_MARK = " "  # between the version that made a state the committed one, and the state; no worker's name has one
_BEFORE = "before:"
LACKING = "kvps: steps that its rounds lacked"
"""What kvps keeps in a state beside the user's: by how many local steps its contributions were shorter than rounds."""


def encoded(state: object) -> str:
    """Return a state as JSON. Raises UsageError unless it is a dict that JSON can hold, InvalidSetting if it is too
    large."""
    if not isinstance(state, dict):
        raise UsageError(f"state must be a dict, not {shown(state)}")
    try:
        text = json.dumps(state, separators=(",", ":"), allow_nan=False)
        same = json.loads(text) == state
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"state must be what JSON can hold: {error}") from None
    if not same:
        raise UsageError("state must come back from JSON as it was: take strings as keys, lists for tuples")
    if len(text) > MOST_BYTES:
        raise InvalidSetting(f"state has {len(text):,} bytes as JSON, and may have {MOST_BYTES:,}: keep less in it")
    return text


def decoded(text: str, worker: str) -> dict[str, Any]:
    """Return the state of which `encoded` made a text; {} for "". Raises CorruptData."""
    state = from_json(text or "{}", f"the state of worker {worker!r}", MOST_BYTES)
    if not isinstance(state, dict):
        raise CorruptData(f"the state of worker {worker!r} is no object")
    return state


def committed(hash: Mapping[str, str]) -> dict[str, str]:
    """Return the fields of all workers' committed states."""
    return {field: text for field, text in hash.items() if _MARK not in field and not field.startswith(_BEFORE)}


def undone(hash: Mapping[str, str], version: int) -> dict[str, str]:
    """Return the fields of the states that were committed before this version, the newest."""
    states = {
        worker: hash.get(f"{_BEFORE}{worker}", "") if text.partition(_MARK)[0] == str(version) else text
        for worker, text in committed(hash).items()
    }
    return {worker: text for worker, text in states.items() if text}


def values(hash: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Return the committed state of each worker that has one, as its user knows it. Raises CorruptData."""
    states = {worker: decoded(text.partition(_MARK)[2], worker) for worker, text in committed(hash).items()}
    for state in states.values():
        state.pop(LACKING, None)
    return states
