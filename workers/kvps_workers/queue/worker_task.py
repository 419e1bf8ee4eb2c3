"""A task of the queue: one worker of one job, for a free host. It is stored as a call in JSON, as RQ stores one.

Anybody may have written a stored task. So it is read field by field, within bounds, and no name in it is looked up:
there is one function, and it is only a name.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from kvps.errors import CorruptData, InvalidName, InvalidTask
from kvps.parsing import MOST_TEXT, from_json
from kvps.protocol.keys import check_name

FUNCTION = "kvps.train"  # nothing imports it: RQ's own worker fails on it, and loses nothing
_MOST_SLOW = 1000.0
_OPTIONAL = 10**16  # us since 1970: a time that no clock will show


@dataclass(frozen=True)
class WorkerTask:
    """The task of worker `worker` of the job `job` with the id `id`. `slow` stretches the worker's steps."""

    job: str
    id: str
    worker: str
    slow: float = 1.0
    prefetch: bool = False

    def __str__(self) -> str:
        return f"{self.job} {self.worker}"

    def payload(self) -> str:
        """Return the call as RQ stores it, in printable ASCII."""
        return json.dumps([FUNCTION, None, [], asdict(self)])

    @classmethod
    def of(cls, payload: str) -> WorkerTask:
        """Read a payload, which anybody may have written. Raises InvalidTask."""
        try:
            function, instance, args, kwargs = from_json(payload, "its payload", MOST_TEXT)
        except (CorruptData, ValueError, TypeError):  # no JSON, or not four items
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


def place(submitted_us: int, optional: bool) -> int:
    """Return the place in the queue of the tasks of a job that was submitted then: the tasks that a job only takes if
    there are hosts to spare come behind all that jobs need."""
    return submitted_us + (_OPTIONAL if optional else 0)


def place_of(id: str) -> int | None:
    """Return the place of a task in the queue; None if the task's id does not say."""
    first, dash, _ = id.partition("-")
    return int(first) if dash and first.isdecimal() and first.isascii() and len(first) < 20 else None


def is_optional(id: str) -> bool:
    """Return whether a task's job can do without it."""
    return (place_of(id) or 0) >= _OPTIONAL


def _clipped(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
