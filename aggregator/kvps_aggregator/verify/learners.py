"""Checks who published the versions of a job. Pure.

Nothing makes such a version again: the log says who published which bits.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvps.protocol.plan import Plan


class Learners:
    """The learners of a log, in the order in which they held the job."""

    def __init__(self) -> None:
        self._all: dict[str, None] = {}
        self._last = ""

    def __len__(self) -> int:
        return len(self._all)

    def problems(self, plan: Plan) -> Iterator[str]:
        """Yield the reasons why no learner can have published the version of this plan, which is the next one."""
        if plan.contributions or plan.rejected:
            yield "it holds contributions, and a learner publishes the job"
        if not plan.by:
            yield "it does not say who published it"
        elif plan.by != self._last and plan.by in self._all:
            yield f"{plan.by} published it, which {self._last} had replaced before"
        if plan.divisor != 1:
            yield f"its divisor is {plan.divisor}, and what a learner publishes is divided by nothing"
        if plan.lr is not None:
            yield f"its learning rate is {plan.lr}, and the job has none"
        self._all[plan.by], self._last = None, plan.by
