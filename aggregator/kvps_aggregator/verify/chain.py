"""Checks a commit log as a chain: each entry follows from the one before, and could have been planned. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, pairwise
from typing import NamedTuple

from kvps.config import JobConfig
from kvps.config.unit_rounds import UnitRounds
from kvps.errors import counted
from kvps.history.commit_log import with_changes
from kvps.optim import reductions
from kvps.parsing import Fields
from kvps.protocol.job_state import Begin, Commit, State
from kvps.protocol.plan import Plan
from kvps_aggregator.verify.learners import Learners
from kvps_aggregator.verify.members import Members, Rates
from kvps_aggregator.verify.once import Sequences, Units


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


def settings_of(commit: Commit, config: JobConfig) -> JobConfig:
    """Return the settings that a commit was made with, if the one before it had `config`. Raises CorruptData."""
    for fields in commit.noted:
        config = with_changes(config, fields) if fields["kind"] == "restore" else config
    return config


class _Present(NamedTuple):
    """The job as it is now: its settings, its number of shards, and the version with which its own log begins."""

    config: JobConfig
    shards: int
    begin: int


class Chain:
    """The checked part of a log. `uses`: base version -> the last version with a contribution computed on it.
    `learners` are those that published its versions.

    `config` are the settings of its first commit, and `own` those of the job now. Of the user's code, a log may name
    only what `own` does: a worker may write there, and would choose what a replay imports.
    """

    def __init__(self, begin: Begin, state: State, shards: int, config: JobConfig, own: JobConfig) -> None:
        self.version, self.head, self.contributions = begin
        self.uses: dict[int, int] = {}
        self.learners = Learners()
        self._begin = begin
        self._clock: Counter[str] = Counter()
        self._ranks = {member.worker: member.rank for member in state.members.values()}
        self._config, self._job = config, _Present(own, shards, state.begin.version)
        self._sequences, self._units = Sequences(config), Units(config)
        self._members, self._rates = Members(state), Rates()

    def add(self, commit: Commit) -> None:
        """Check the next commit, and go on from it. Raises Unproved."""
        config = settings_of(commit, self._config)
        if others := [name for name in config.user_code if name not in self._job.config.user_code]:
            raise Unproved(f"the log names the code {others[0]!r}, and the job does not: kvps imports none of it")
        if config.metadata.publishes != self._job.config.metadata.publishes:
            raise Unproved("the log says that others made some of the versions: workers, or else a learner")
        if config != self._config:
            self._config, self._sequences = config, Sequences(config)
            self._units.total = config.units
        for fields in commit.noted:
            f, kind = Fields(fields, "an entry of the log"), fields["kind"]
            for each in (self._sequences, self._members, self._rates):
                each.note(kind, f)
        for problem in self._problems(commit):
            raise Unproved(f"commit {self.version + 1}: {problem}")
        for c in commit.plan.contributions:
            self._clock[c.worker] += 1
            if c.weight:
                self.uses[c.base] = commit.version
        self.version, self.head = commit.version, commit.head
        self.contributions += len(commit.plan.contributions)
        self._members.committed()

    def end(self, state: State) -> None:
        """Compare the last entry with the job. Raises Unproved."""
        if self.version != state.version:
            raise Unproved(f"commit {self.version + 1}: it is missing from the log, which ends before it")
        if self.head != state.head:
            raise Unproved(
                f"version {self.version}: the log ends at head {self.head[:12]}, the job at {state.head[:12]}"
            )
        for problem in self._missing(state):
            raise Unproved(f"version {self.version}: {problem}")

    def _missing(self, state: State) -> Iterator[str]:
        """Yield what the job has counted and the log has not."""
        had, of_all = counted(self.contributions, "contribution"), sum(state.clock.values())
        if self.contributions != of_all:
            yield f"the log has {had}, the job has counted {of_all:,}"
        if self._begin.version or self._config.metadata.publishes:  # its units are prompts
            return
        for worker, clock in state.clock.items():
            if self._clock[worker] != clock:
                had = counted(self._clock[worker], "contribution")
                yield f"the log has {had} of {worker}, the job has counted {clock:,}"
        if not self._config.unit_rounds and (unit := self._units.missing(state)) is not None:
            yield f"unit {unit} is missing from the log: it was handed out, and no worker has it"

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
        is_own = commit.version > self._job.begin
        shards = self._job.shards if is_own else len(commit.shards)  # an older job has its own number
        if len(commit.shards) != shards:
            yield f"it names {counted(len(commit.shards), 'shard')}, the job has {shards}"
        if self._config.metadata.publishes:
            if plan.trained and not self._config.metadata.rollouts:
                yield "it was trained on experience, and the job takes none"
            yield from self.learners.problems(plan)
            return
        if plan.by or plan.loss is not None or plan.trained:
            yield "it says that a learner published it, and workers train the job"
        if strangers := [c.worker for c in plan.contributions if c.worker not in self._ranks]:
            yield f"it holds a contribution of {strangers[0]!r}, which never joined"
        for c in plan.contributions:
            who = f"contribution {c.seq} of {c.worker}"
            if not 0 <= c.base < commit.version:
                yield f"{who} was computed on version {c.base}, which did not exist yet"
            if c.weight and len(c.digests) != shards:
                yield f"{who} has {counted(len(c.digests), 'digest')}, the job {counted(shards, 'shard')}"
        wrong = self._wrong_units(plan, rounds) if (rounds := self._config.unit_rounds) else self._wrong_rounds(plan)
        yield from chain(
            wrong, self._sequences.problems(plan), self._members.strange_ranks(), self._wrong_numbers(plan)
        )

    def _wrong_numbers(self, plan: Plan) -> Iterator[str]:
        """Yield which of a plan's weights, its divisor and its learning rate do not follow from the settings and from
        what the log says."""
        takes_weights = reductions.parse(self._config.reduction).takes_weights
        for c in plan.contributions:
            if (c.weight > 1 and not takes_weights) or (c.weight == 0 and self._config.nonfinite != "skip"):
                yield f"contribution {c.seq} of {c.worker} has the weight {c.weight}, which its job does not take"
        took = len(plan.contributions) + len(plan.rejected)
        if self._config.unit_rounds or self._config.quorum:
            divisors = range(took, took + 1)
        else:
            divisors = self._members.divisors({c.worker for c in (*plan.contributions, *plan.rejected)})
        if plan.divisor not in divisors:
            wanted = " to ".join(map(str, sorted({divisors[0], divisors[-1]})))
            yield f"its divisor is {plan.divisor}, and by the workers that the job had it is {wanted}"
        if not self._rates.add(plan.lr):
            rate = "its optimizer's own" if plan.lr is None else plan.lr
            yield f"its learning rate is {rate}, and no entry sets that"

    def _wrong_rounds(self, plan: Plan) -> Iterator[str]:
        """Yield what is wrong with the order of a plan's contributions, and with their units."""
        order = [(self._ranks[c.worker], c.round) for c in plan.contributions]
        if any(later <= earlier for earlier, later in pairwise(order)):
            yield "its contributions do not stand in rank order, each worker's in the order of its rounds"
        yield from self._units.problems(plan)

    def _wrong_units(self, plan: Plan, rounds: UnitRounds) -> Iterator[str]:
        """Yield what is wrong with the units of a plan: they are those of its round, each once, in their order."""
        units = [c.unit for c in plan.contributions if c.unit is not None]
        if any(later <= earlier for earlier, later in pairwise(units)):
            yield "its units do not stand in their order, each once"
        wanted = rounds.units_of(plan.version - 1)
        if sorted(units + [c.unit for c in plan.rejected if c.unit is not None]) != list(wanted):
            yield f"it is not made of units {wanted.start} to {wanted.stop - 1}, which are those of its round"
        oldest = plan.version - 1 - self._config.staleness
        for c in plan.contributions:
            if c.base < oldest:
                yield f"unit {c.unit} was computed on version {c.base}, and its round allows none before {oldest}"
