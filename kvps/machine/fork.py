"""The process that owns an object, so that forks of that process leave the object alone.

A forked child has copies of its parent's sessions, connections, servers and locks, but the resources behind them exist
once, and the parent still uses them. A child that used them too would send on its parent's connections and push under
its parent's sequence numbers; a child that merely exited would leave its parent's jobs and end its parent's servers.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from kvps.errors import WrongOrder


class ProcessOwner:
    """The process that made an object; `what` names the object in errors."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether this process is the owner, and no fork of it."""
        return os.getpid() == self._pid

    def check(self) -> None:
        """Raise WrongOrder in a fork of the owner."""
        if not self.is_here:
            raise WrongOrder(
                f"{self._what} belongs to process {self._pid}, of which this one is a fork: connect and join anew here"
            )

    def run(self, call: Callable[[], None]) -> None:
        """Run `call`, but not in a fork: for finalizers, which forks run too."""
        if self.is_here:
            call()
