"""Which command launched the workers of a job: `kvps up` and `kvps run` start them as processes of their own.

The job notes it (`JobConfig.launched_by`), and each of the command's processes has the same words in its environment.
So a process knows whether it is one of them.

KVPS_LAUNCHER   the command that started this process: JSON of its words and of what makes its process unique
"""

from __future__ import annotations

import json
import os
from typing import NamedTuple

from kvps.machine import process

VARIABLE = "KVPS_LAUNCHER"
_KINDS = {"command": str, "host": str, "pid": int, "start": str, "space": str}


class Launcher(NamedTuple):
    """A command that launched the workers of a job, and the process that it is or was."""

    command: str
    host: str
    pid: int
    start: str
    space: str

    @classmethod
    def of(cls, text: str) -> Launcher:
        """From what a job notes. Raises ValueError if that is none."""
        found = json.loads(text)
        if not isinstance(found, dict) or any(type(found.get(name)) is not kind for name, kind in _KINDS.items()):
            raise ValueError(f"no launcher: {text[:80]!r}")
        return cls(**{name: found[name] for name in _KINDS})

    @property
    def is_dead(self) -> bool:
        """Whether its process is surely gone. Of another machine's nothing is sure."""
        return process.is_dead(self._asdict())

    @property
    def is_elsewhere(self) -> bool:
        """Whether this process cannot see if it lives."""
        return self.space == "" or self.space != process.identity()["space"]

    def __str__(self) -> str:
        return f"{self.command} (process {self.pid} on {self.host})"


def this_process(command: str) -> str:
    """What a job notes of this process, which runs `command`."""
    me = process.identity() | {"command": command}
    return json.dumps({name: me[name] for name in _KINDS})


def own() -> str:
    """What the command notes that started this process; "" if none did that launches workers."""
    return os.environ.get(VARIABLE, "")
