"""Jobs that hand out units of data: workers that do them, some of which die, and which units were committed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Set
from typing import Any

import numpy as np

from kvps.job import Job, await_unit

Params = dict[str, np.ndarray]
ZERO = {"x": np.zeros(3, np.float32)}
PATIENT: dict[str, Any] = {"worker_timeout_ms": 60_000}


def grads(value: float) -> Params:
    return {"x": np.full(3, value, np.float32)}


def do_units(
    job: Job,
    worker: str,
    gradient: Callable[[Params, int], Params],
    dies_at: Set[int] = frozenset(),
    died: set[int] | None = None,
) -> None:
    """Take and push units until all are committed; die in the middle of each of `dies_at` that is not among the `died`
    yet."""
    died, again = set() if died is None else died, True
    while again:
        session = job.join(worker, takeover=True)
        while (unit := session.next_unit()) is not None:
            params = session.pull()
            if unit in dies_at and unit not in died:
                died.add(unit)
                if len(died) % 2:  # others may take its unit; else it comes back at once, and does it again
                    job.evict(job.state().members[worker])
                break
            session.push(gradient(params, unit))
        else:
            session.leave()
            again = await_unit(job)


def used(job: Job) -> Counter[int | None]:
    """Return how often each unit was committed."""
    return Counter(c.unit for commit in job.log() for c in commit.plan.contributions)
