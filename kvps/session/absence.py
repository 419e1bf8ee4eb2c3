"""The rounds that a job makes while a worker is away, and the line of the log that says which they were."""

from __future__ import annotations

import logging

from kvps.parsing import whole
from kvps.protocol.answers import Joined
from kvps.transport.access import JobAccess

log = logging.getLogger("kvps.session")


def rounds_skipped(access: JobAccess, worker: str) -> int | None:
    """Return how many rounds a worker has skipped so far; None if it has not joined before."""
    skipped = access.client.call("HGET", access.keys.skip, worker)
    return None if skipped is None else whole(skipped, f"the skipped rounds of worker {worker!r}")


def log_absence(worker: str, skipped_before: int | None, joined: Joined) -> None:
    """Log which rounds, counted from 0, were made without a worker that is back. Its own clock did not move."""
    if skipped_before is None:
        return
    first = joined.clock + skipped_before
    after = joined.round - joined.pending
    if after > first:
        rounds = f"round {first} was" if after == first + 1 else f"rounds {first} to {after - 1} were"
        log.warning("%s is back: %s done without it", worker, rounds)
