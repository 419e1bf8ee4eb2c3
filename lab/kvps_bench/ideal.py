"""What waiting alone costs: a model of a job whose protocol, server and processors take no time. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from kvps.staleness import admits

_ROUNDS = 400


def contribution_s(takes: Callable[[int, int], float], workers: int, staleness: int) -> float:
    """Return the seconds from one contribution to the next, of all workers together, if only the bound delays them.

    `takes(rank, iteration)` is how many seconds a worker computes; it is called once each, in each worker's order.
    """
    rounds, idle, now = [0] * workers, set(range(workers)), 0.0
    at_work: list[tuple[float, int]] = []
    for _ in range(_ROUNDS * workers):
        for rank in sorted(idle):
            if admits(rounds[rank], rounds, staleness):
                idle.remove(rank)
                heapq.heappush(at_work, (now + takes(rank, rounds[rank]), rank))
        now, rank = heapq.heappop(at_work)
        rounds[rank] += 1
        idle.add(rank)
    return now / (_ROUNDS * workers)
