"""A training task: one worker of one job, for a host that is free; as JSON of a call, as RQ stores one, and back.

Anybody may have written what is read here. So it is read field by field, within bounds, and nothing of it is looked up
by its name: of functions there is one, and it is only a name.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvps.errors import InvalidName, InvalidTask
from kvps.protocol.keys import check_name

FUNCTION = "kvps.train"  # nothing imports it: a worker of RQ's own fails on it, and loses nothing
PAYLOAD_BYTES = 16 << 10
_MOST_SLOW = 1000.0


@dataclass(frozen=True)
class WorkerTask:
    """Be worker `worker` of the job `job`, the one whose own id is `id`."""

    job: str
    id: str
    worker: str
    slow: float = 1.0
    prefetch: bool = False

    def __str__(self) -> str:
        return f"{self.job} {self.worker}"

    @classmethod
    def of(cls, payload: bytes) -> WorkerTask:
        """Read a payload as RQ stores it, which anybody may have written. Raises InvalidTask."""
        try:
            function, instance, args, kwargs = json.loads(_inflated(payload))
        except (ValueError, RecursionError, TypeError, zlib.error):
            raise InvalidTask("its payload is no JSON of a call") from None
        if function != FUNCTION or instance is not None:
            raise InvalidTask(f"it asks for {_clipped(function)}, and only {FUNCTION} is on the list")
        types = {"job": str, "id": str, "worker": str, "slow": float, "prefetch": bool}
        if args or not isinstance(kwargs, dict) or kwargs.keys() != types.keys():
            raise InvalidTask(f"it wants other arguments than {', '.join(types)}")
        for name, kind in types.items():
            if type(kwargs[name]) is not kind:
                raise InvalidTask(f"its {name} is {_clipped(kwargs[name])}")
        task = cls(**kwargs)
        try:
            for what, given in (("job", task.job), ("job", task.id), ("worker", task.worker)):
                check_name(what, given)
        except InvalidName as error:
            raise InvalidTask(_clipped(str(error))) from None
        if not 1 <= task.slow <= _MOST_SLOW:
            raise InvalidTask(f"its slow is {task.slow}")
        return task


class Started(NamedTuple):
    """An execution of a task: a host has it. `beat` changes while that lives; `identity` is that of its process."""

    id: str
    name: str
    host: str
    beat: str
    identity: Mapping[str, Any]


def submitted(id: str) -> int | None:
    """When the job of a task was submitted, us; None if its id does not say."""
    first, dash, _ = id.partition("-")
    return int(first) if dash and first.isdecimal() and first.isascii() and len(first) < 20 else None


def _inflated(payload: bytes) -> bytes:
    """What RQ compressed, if it did and it is not too long. Raises ValueError."""
    if not payload.startswith(b"x"):
        return payload
    inflate = zlib.decompressobj()
    text = inflate.decompress(payload, PAYLOAD_BYTES)
    if inflate.unconsumed_tail:
        raise ValueError("too long")
    return text


def _clipped(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
