"""The staleness rule, alone and pure.

A worker's *round* counts its contributions plus the rounds it was not there for. With staleness `s` it may
compute round r + 1 only on weights that hold round r - s of every member. BSP is s = 0, SSP is s = N, ASP is
s = -1 and never waits. (SSP: Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel
Parameter Server", NIPS 2013.)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

ASP = -1


def mode_name(staleness: int) -> str:
    """What the field calls this staleness: BSP, SSP(N) or ASP."""
    if staleness == ASP:
        return "ASP"
    return "BSP" if staleness == 0 else f"SSP({staleness})"


def admits(rounds_done: int, committed_rounds: Iterable[int], staleness: int) -> bool:
    """Whether a worker that has done `rounds_done` rounds may start the next on weights holding `committed_rounds`.

    `committed_rounds` are those of all members, the worker itself included.
    """
    if staleness == ASP:
        return True
    return all(done >= rounds_done - staleness for done in committed_rounds)


def progress(clock: Mapping[str, int], workers: int) -> float:
    """Contributions committed per worker: what learning-rate schedules run over, the same in every mode."""
    return sum(clock.values()) / workers
