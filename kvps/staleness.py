"""The staleness rule, as pure functions.

A worker's *round* counts its contributions plus the rounds for which it was absent. With staleness `s`, a worker may
compute round r + 1 only on weights that contain round r - s of every member. BSP is s = 0, SSP is s = N, and ASP is
s = -1 and never waits. (SSP: Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter
Server", NIPS 2013.)

A worker that has done r rounds is *in* round r + 1 once it may compute it, and in round r while it waits. So all are in
the same round in BSP, and none begins a round that is more than s later than the slowest worker's: it is at most s
rounds *ahead*.
"""

from __future__ import annotations

from collections.abc import Iterable

ASP = -1


def mode_name(staleness: int) -> str:
    """Return the common name of a staleness: BSP, SSP(N) or ASP."""
    if staleness == ASP:
        return "ASP"
    return "BSP" if staleness == 0 else f"SSP({staleness})"


def admits(rounds_done: int, committed_rounds: Iterable[int], staleness: int) -> bool:
    """Return whether a worker that has done `rounds_done` rounds may start the next on weights with `committed_rounds`.

    `committed_rounds` has the committed round of each member, the worker itself included.
    """
    if staleness == ASP:
        return True
    return all(done >= rounds_done - staleness for done in committed_rounds)
