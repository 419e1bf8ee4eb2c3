"""Which process an object belongs to, so that a fork of that process leaves it alone.

A fork has a copy of everything: of sessions, connections, servers and locks. What is behind them is there once, and the
process that forked goes on using it. A child that went on too would speak on its parent's connections and push under
its parent's sequence numbers; a child that merely ended would leave jobs and end servers for its parent.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from kvps.errors import WrongOrder


class ProcessOwner:
    """The process that made an object; `what` is the object as an error calls it."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether this process is the owner, and no fork of it."""
        return os.getpid() == self._pid

    def check(self) -> None:
        """Raises WrongOrder in a fork of the owner."""
        if not self.is_here:
            raise WrongOrder(
                f"{self._what} belongs to process {self._pid}, of which this one is a fork: connect and join anew here"
            )

    def run(self, call: Callable[[], None]) -> None:
        """Call it, but not in a fork: for finalizers, which forks run too."""
        if self.is_here:
            call()
