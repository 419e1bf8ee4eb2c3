"""Who was in a job, and which learning rate was set, as the entries between its commits say. Pure.

A plan is opened some time before its commit. So what held at any time since the commit before may be in it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from kvps.parsing import Fields
from kvps.protocol.job_state import State
from kvps.protocol.plan import set_lr

_OUT, _EITHER, _IN = (0, 0), (0, 1), (1, 1)


class Members:
    """How many workers a mean is divided by: those in the vector clock and those that have finished. Each worker that
    does not contribute counts for 0 or 1, within bounds where the log does not say it."""

    def __init__(self, state: State) -> None:
        self._members = state.members
        self._counts = dict.fromkeys(state.members, _EITHER)
        self._since: dict[str, tuple[int, int]] = {}  # since the last commit, of those that something happened to
        self._joins: list[tuple[str, int]] = []

    def note(self, kind: str, f: Fields) -> None:
        """Note an entry that stands between two commits."""
        if kind in ("create", "restore"):
            self._counts = {} if kind == "create" else dict.fromkeys({*self._members, *self._counts}, _EITHER)
        elif kind == "join":
            self._joins.append((f.name("worker"), f.whole("rank")))
            self._set(f.name("worker"), _IN)
        elif kind == "leave":
            self._set(f.name("worker"), {"1": _IN, "0": _OUT}.get(f.text("finished", default=""), _EITHER))
        elif kind == "evict":
            self._set(f.name("worker"), _OUT)
        elif kind in ("adopt", "recover"):  # these have workers come back; after a loss the last entries may be undone
            for worker, count in list(self._counts.items()):
                self._set(worker, _EITHER if count == _OUT else self._since.get(worker, count))
            self._joins = self._joins if kind == "adopt" else []

    def _set(self, worker: str, count: tuple[int, int]) -> None:
        before = self._since.get(worker, self._counts.get(worker, _OUT))
        self._since[worker] = min(before[0], count[0]), max(before[1], count[1])
        self._counts[worker] = count

    def divisors(self, contributors: Collection[str]) -> range:
        """Return what the divisor of the next plan may be, if these workers contribute to it."""
        others = [self._since.get(w, count) for w, count in self._counts.items() if w not in contributors]
        low, high = (sum(bound) + len(contributors) for bound in zip(_OUT, *others, strict=True))
        return range(low, high + 1)

    def strange_ranks(self) -> Iterator[str]:
        """Yield which workers have joined since the last commit with another rank than they have."""
        for worker, rank in self._joins:
            if (member := self._members.get(worker)) and member.rank != rank:
                yield f"{worker} joined before it with rank {rank}, and the job has it with rank {member.rank}"

    def committed(self) -> None:
        """Go on behind a commit."""
        self._since.clear()
        self._joins.clear()


class Rates:
    """The learning rates that may have been set when a plan was opened: numbers, or None for the optimizer's own."""

    def __init__(self) -> None:
        self._now: set[float | None] | None = None  # None while it is not known
        self._since: set[float | None] | None = None  # since the last commit
        self._begun = False

    def note(self, kind: str, f: Fields) -> None:
        """Note an entry that stands between two commits."""
        if kind == "create" or (kind == "restore" and "lr" in f):
            self._now = self._since = {_rate(f)}
        elif kind == "restore":
            self._now = self._since = None
        elif kind == "set":
            self._now = {_rate(f)}
            self._since = None if self._since is None else self._since | self._now
        elif kind == "recover":  # the server may have lost what was set last
            self._now = self._since

    def add(self, lr: float | None) -> bool:
        """Return whether a plan may have this rate, and go on behind its commit."""
        may = self._since is None or lr in self._since
        if self._now is None and self._begun:  # what was set before this plan is in it
            self._now = {lr}
        self._since, self._begun = self._now, True
        return may


def _rate(f: Fields) -> float | None:
    return set_lr(f) if f.text("lr", default="") else None
