"""Which replicas a server has, and how many of them must have what is stored there.

A Sentinel, or a vote in a cluster, may promote any replica. Until the old master is told, it takes writes, and the
replicas that it still has confirm them. So one confirmation says nothing where there are two replicas: all must
confirm, as many as there were when the job was created. The promoted one does so no more. The model in
tests/protocol/replication.py has this rule, and what a weaker one loses.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from redis.exceptions import TimeoutError as RedisTimeoutError

from kvps.connection.resp import Command, granted
from kvps.errors import counted

_REPLICA_MS = 1000  # the longest wait for replicas before another try
_IN_STEP = re.compile(r"^slave\d+:.*\bstate=online\b", re.MULTILINE)
ASK_ATTACHED: Command = ("INFO", "replication")


class NotReplicated(RedisTimeoutError):
    """What was written may be lost by a failover. `remedy` says what to do."""

    def __init__(self, why: str, remedy: str) -> None:
        super().__init__(why)
        self.remedy = remedy


class Copies(NamedTuple):
    """How many replicas of a server must confirm what is stored there, and how many it may have at most."""

    least: int = 0
    most: float = math.inf

    def asked(self) -> list[Command]:
        """Return the commands that wait for the replicas, behind writes on the same connection."""
        limited = self.most < math.inf
        return [("WAIT", self.least, _REPLICA_MS), *([ASK_ATTACHED] if limited else [])] if self.least else []

    def check(self, replies: Sequence[Any]) -> None:
        """Raise NotReplicated unless the replies to `asked` say that the replicas have it all; and a reply that is an
        error."""
        if not granted(replies):
            return
        if (confirmed := replies[0]) < self.least:
            raise NotReplicated(
                f"{confirmed} of {self.least} replicas of a server have confirmed what was written",
                "start the one that is away, or attach another in its place",
            )
        if self.most < math.inf and (attached := in_step(replies[1])) > self.most:
            raise NotReplicated(
                f"a server has {counted(attached, 'replica')}, and the job was created for {self.most}",
                "detach what was added, which may take over without what was acknowledged",
            )


def all_of(replicas: int) -> Copies:
    """Return the demand that all replicas have what is stored, where a server has so many."""
    return Copies(replicas, replicas or math.inf)


NONE = Copies()
IF_ANY = Copies(-1)
"""One replica, if the server has any."""


def in_step(info: str) -> int:
    """Return how many replicas get what a server writes, by its INFO replication: one that is still copying does not
    count."""
    return len(_IN_STEP.findall(info))


class Attached(NamedTuple):
    """The replicas of the master that has the fewest, and of the one with the most; and how many servers are known to
    the Sentinels, or to the cluster, as replicas and are attached to no master now."""

    fewest: int
    most: int
    away: int = 0

    def why_not_all(self) -> tuple[str, str]:
        """Return why it cannot be said how many replicas must confirm, and what to do; two empty texts if it can."""
        if self.away:
            return (
                f"{counted(self.away, 'known replica')} cannot be reached, and may take over later",
                "start it, or have it forgotten (SENTINEL RESET, CLUSTER FORGET)",
            )
        if not self.fewest:
            return "one server has none", "add a replica, or choose durability 'memory'"
        if self.most > self.fewest:
            return f"servers have from {self.fewest} to {self.most}", "give each master as many"
        return "", ""
