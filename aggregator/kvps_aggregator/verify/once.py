"""Checks that each contribution, and each unit of data, counts once and that none is left out. Pure.

An incarnation numbers what is accepted from it: 1, 2, 3, ... Each number stands in one plan, unless another entry says
that its unit was done twice or was damaged, or the job drops late contributions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from kvps.config import JobConfig
from kvps.parsing import Fields
from kvps.protocol.job_state import State
from kvps.protocol.plan import Contribution, Plan

Incarnation = tuple[str, str]
"""A worker's name, and its incarnation."""


class Sequences:
    """The sequence numbers, rounds and bases of the contributions of each incarnation, in the order of its pushes. In
    rounds of units that are open at once, a later one may be committed first."""

    def __init__(self, config: JobConfig) -> None:
        self._config = config
        self._ahead = config.staleness if config.unit_rounds else 0
        self._is_bsp = config.staleness == 0 and not config.quorum and not config.unit_rounds
        self._next: dict[Incarnation, int] = {}
        self._said: set[tuple[Incarnation, int]] = set()  # of which another entry says that they do not count
        self._due: dict[Incarnation, dict[int, int]] = defaultdict(dict)  # number -> the version that must have it
        self._bases: dict[Incarnation, int] = {}
        self._rounds: dict[str, int] = {}

    def note(self, kind: str, f: Fields) -> None:
        """Note an entry that stands between two commits."""
        if kind == "join":
            self._next[f.name("worker"), f.word("incarnation")] = 1
        elif kind in ("duplicate", "reject"):
            self._said.add(((f.name("worker"), f.word("incarnation")), f.whole("seq")))

    def problems(self, plan: Plan) -> Iterator[str]:
        """Yield what is wrong with a plan's contributions, beside those before them."""
        for c in plan.rejected:
            who = c.worker, c.incarnation
            if who in self._next and (who, c.seq) not in self._said:
                yield f"contribution {c.seq} of {c.worker} is rejected, and no entry says why"
        for c in sorted((*plan.contributions, *plan.rejected), key=_in_order):
            yield from self._misnumbered(c, plan.version)
            if not self._config.unit_rounds:
                yield from self._misplaced(c, plan.version)
        for (worker, incarnation), numbers in list(self._due.items()):
            for number, due in list(numbers.items()):
                if due <= plan.version:
                    del numbers[number]
                    if ((worker, incarnation), number) not in self._said:
                        yield f"contribution {number} of {worker} is missing: no entry says what became of it"
            if not numbers:
                del self._due[worker, incarnation]

    def _misnumbered(self, c: Contribution, version: int) -> Iterator[str]:
        who = c.worker, c.incarnation
        follows = self._next.get(who)
        if follows is None:  # it joined in a part of the log that is not there
            if self._ahead:
                return
            follows = c.seq
        if c.seq < follows and self._due[who].pop(c.seq, None) is None:
            yield f"contribution {c.seq} of {c.worker} was committed before"
        if c.seq > follows and self._config.late != "drop":  # a late one that was dropped has used its number
            gap = range(follows, min(c.seq, follows + 2 * self._config.max_pending))
            self._due[who] |= dict.fromkeys(gap, version + self._ahead)
        self._next[who] = max(follows, c.seq + 1)

    def _misplaced(self, c: Contribution, version: int) -> Iterator[str]:
        who, name = (c.worker, c.incarnation), f"contribution {c.seq} of {c.worker}"
        if self._is_bsp and (c.round, c.base) != (version, version - 1):
            yield f"{name} is of round {c.round}, on version {c.base}, and this is the version of round {version}"
        elif c.round <= self._rounds.get(c.worker, 0):
            yield f"{name} is of round {c.round}, and round {self._rounds[c.worker]} of {c.worker} stands before it"
        elif c.base < self._bases.get(who, 0):
            yield f"{name} was computed on version {c.base}, after one on version {self._bases[who]}"
        self._rounds[c.worker], self._bases[who] = c.round, c.base


class Units:
    """The units of data that were committed, where a version is no round of units."""

    def __init__(self, config: JobConfig) -> None:
        self.total = config.units
        self._low = 0  # all below are committed
        self._ahead: set[int] = set()

    def problems(self, plan: Plan) -> Iterator[str]:
        """Yield what is wrong with the units of the next plan."""
        for c in plan.contributions:
            who = f"contribution {c.seq} of {c.worker}"
            if (c.unit is None) == bool(self.total) or (c.unit or 0) > max(0, self.total - 1):
                yield f"{who} is of unit {c.unit}, and the job has {self.total}"
            elif c.unit is not None:
                if c.unit < self._low or c.unit in self._ahead:
                    yield f"{who} is of unit {c.unit}, which was committed before"
                self._add(c.unit)

    def _add(self, unit: int) -> None:
        self._ahead.add(unit)
        while self._low in self._ahead:
            self._ahead.remove(self._low)
            self._low += 1

    def missing(self, state: State) -> int | None:
        """Return the first unit that was handed out, and is neither committed nor with a worker; None if there is
        none. The log must go back to version 0."""
        handed_out = range(self._low, int(state.units.get("next", 0)))
        return next((unit for unit in handed_out if unit not in self._ahead and str(unit) not in state.units), None)


def _in_order(c: Contribution) -> tuple[int, str, int]:
    """Return the key by which a worker's contributions come in the order of its pushes: a version may have those of an
    earlier incarnation and of a later one, whose numbers begin anew."""
    number = c.incarnation.partition("-")[0]
    return len(number), number, c.seq
