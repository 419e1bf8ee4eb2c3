"""Checks a commit log as a chain: each entry follows from the one before, and could have been planned. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

from kvps.config import JobConfig
from kvps.config.unit_rounds import UnitRounds
from kvps.errors import counted
from kvps.protocol.job_state import Begin, Commit, State
from kvps.protocol.plan import Plan


class Unproved(Exception):
    """Raised with the reason why a log, or its replay, is not what it must be."""


@contextmanager
def located(where: str) -> Iterator[None]:
    """Put `where` before the reason of an Unproved that is raised inside the block."""
    try:
        yield
    except Unproved as reason:
        raise Unproved(f"{where}: {reason}") from reason


def digest_of(shard: str) -> str:
    """Return the digest in "<term> <digest>"."""
    return shard.rpartition(" ")[2]


class Chain:
    """The checked part of a log. `uses`: base version -> the last version with a contribution computed on it."""

    def __init__(self, begin: Begin, state: State, shards: int, config: JobConfig | None = None) -> None:
        self.version, self.head, self.contributions = begin
        self.uses: dict[int, int] = {}
        self._ranks = {member.worker: member.rank for member in state.members.values()}
        self._seqs: dict[tuple[str, str], int] = {}
        self._shards = shards
        self._unit_rounds = config.unit_rounds if config else None
        self._staleness = config.staleness if config else 0
        self._own = state.begin.version

    def add(self, commit: Commit) -> None:
        """Check the next commit, and go on from it. Raises Unproved."""
        for problem in self._problems(commit):
            raise Unproved(f"commit {self.version + 1}: {problem}")
        for c in commit.plan.contributions:
            if c.weight:
                self.uses[c.base] = commit.version
        self.version, self.head = commit.version, commit.head
        self.contributions += len(commit.plan.contributions)

    def end(self, state: State) -> None:
        """Compare the last entry with the job. Raises Unproved."""
        if self.version != state.version:
            raise Unproved(f"commit {self.version + 1}: it is missing from the log, which ends before it")
        if self.head != state.head:
            raise Unproved(
                f"version {self.version}: the log ends at head {self.head[:12]}, the job at {state.head[:12]}"
            )

    def _problems(self, commit: Commit) -> Iterator[str]:
        """Yield the reasons why a commit is not the next entry, or is one that kvps cannot have planned."""
        plan = commit.plan
        if commit.version != self.version + 1:
            yield f"it is missing from the log: commit {commit.version} stands in its place"
        if not commit.follows(self.head):
            yield "the chain is broken: its entry is not what was committed after the one before"
        if plan.version != commit.version:
            yield f"its plan is for version {plan.version}"
        if plan.progress != self.contributions:
            had = counted(self.contributions, "contribution")
            yield f"its progress is {plan.progress}, but {had} were committed before it"
        shards = self._shards if commit.version > self._own else len(commit.shards)  # an older job has its own number
        if len(commit.shards) != shards:
            yield f"it names {counted(len(commit.shards), 'shard')}, the job has {self._shards}"
        if strangers := [c.worker for c in plan.contributions if c.worker not in self._ranks]:
            yield f"it holds a contribution of {strangers[0]!r}, which never joined"
        yield from self._wrong_units(plan, self._unit_rounds) if self._unit_rounds else self._wrong_rounds(plan)
        for c in plan.contributions:
            who = f"contribution {c.seq} of {c.worker}"
            if not 0 <= c.base < commit.version:
                yield f"{who} was computed on version {c.base}, which did not exist yet"
            if c.weight and len(c.digests) != shards:
                yield f"{who} has {counted(len(c.digests), 'digest')}, the job {counted(shards, 'shard')}"

    def _wrong_rounds(self, plan: Plan) -> Iterator[str]:
        """Yield what is wrong with the order of a plan's contributions."""
        order = [(self._ranks[c.worker], c.round) for c in plan.contributions]
        if any(later <= earlier for earlier, later in pairwise(order)):
            yield "its contributions do not stand in rank order, each worker's in the order of its rounds"
        for c in plan.contributions:
            if c.seq <= self._seqs.get((c.worker, c.incarnation), 0):
                yield f"contribution {c.seq} of {c.worker} was committed before"
            self._seqs[c.worker, c.incarnation] = c.seq

    def _wrong_units(self, plan: Plan, rounds: UnitRounds) -> Iterator[str]:
        """Yield what is wrong with the units of a plan: they are those of its round, each once, in their order."""
        units = [c.unit for c in plan.contributions if c.unit is not None]
        if any(later <= earlier for earlier, later in pairwise(units)):
            yield "its units do not stand in their order, each once"
        wanted = rounds.units_of(plan.version - 1)
        if sorted(units + [c.unit for c in plan.rejected if c.unit is not None]) != list(wanted):
            yield f"it is not made of units {wanted.start} to {wanted.stop - 1}, which are those of its round"
        oldest = plan.version - 1 - self._staleness
        for c in plan.contributions:
            if c.base < oldest:
                yield f"unit {c.unit} was computed on version {c.base}, and its round allows none before {oldest}"
