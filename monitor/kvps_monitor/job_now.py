"""What a job does at one instant, and which worker waits for which: from a few small replies, without its traces, so
that each screen can say it and all say the same. Times are the server's."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from kvps.config import JobConfig
from kvps.config.unit_rounds import UnitRounds
from kvps.job import Job
from kvps.machine import process
from kvps.parsing import number, whole
from kvps.protocol.job_state import Member, State
from kvps.protocol.run_control import LEARNER_HAS_FINISHED, STATES
from kvps.session.heartbeat import interval_s
from kvps.staleness import admits

JOB_WORDS = FINISHED, *_, ALL_LEFT, LACKS_WORKERS, LACKS_AGGREGATOR, LACKS_LEARNER, STALLED, RUNS = (
    "finished",
    *STATES.values(),
    "all workers left",
    "waits for workers",
    "waits for an aggregator",
    "waits for a learner",
    "stalled",
    "runs",
)
"""What a job may be doing, in a few words. A job that was stopped is finished when its workers have ended. It is
stalled while each of its workers is silent or waits for a worker that is: a round that takes long is no stall. All
workers left if each has ended with rounds undone, as after an error, or was evicted. A job that a learner publishes
runs while a learner holds it; it waits for one that has left it unfinished, or for another."""
AGGREGATOR = "the aggregator"
OTHERS = "workers that have not joined"
NAMED = 4
"""Of many workers that are waited for, so many are named."""
_LATE = 1.6  # a worker is silent after so many intervals between two signs of life


class JobNow(NamedTuple):
    """A job at one instant.

    at_s       the server's time, in seconds since 1970
    state      one of `JOB_WORDS`
    why        who has stopped, suspended or paused it, and why; "" if it goes on, or its learner has finished it
    waits_for  the workers that a stalled job waits for, slowest first
    workers    how many it waits for before its first version; 0 if a learner publishes it
    backlog    accepted contributions that wait for their commit
    holders    the aggregator that holds each shard; "" for none
    terms      how many holders each shard has had
    backups    how many units were handed out a second time, because they were late
    silent_s   worker -> seconds since its last sign of life, of active workers that have given one
    ended      active workers whose process has ended, as has the command that launched it: nobody is left to say so
    silent     these, and the workers for which that is longer than it should be
    """

    at_s: float
    state: str
    why: str
    waits_for: list[str]
    workers: int
    backlog: int
    holders: list[str]
    terms: list[int]
    backups: int
    silent_s: dict[str, float]
    ended: set[str]
    silent: set[str]

    @classmethod
    def read(cls, job: Job, state: State) -> JobNow:
        """Read what is not in the state of the job. Raises CorruptData, ServerLost."""
        keys, config, shards = job.access.keys, job.config, range(job.layout.shards)
        beats, backlog, planned, holders, terms, backups = job.access.client.together(
            [
                ("ZRANGE", keys.heartbeat, 0, -1, "WITHSCORES"),
                ("XLEN", keys.inbox),
                ("EXISTS", keys.plan),
                ("MGET", *map(keys.lease, shards)),
                ("MGET", *map(keys.term, shards)),
                ("HGET", keys.version, "backups"),
            ]
        )
        at_s = job.access.server.seconds()
        silent_s = _silent_s(beats, state, at_s)
        late_s = _LATE * interval_s(config.worker_timeout_ms)
        ended = _ended(config, state)
        silent = ended | {worker for worker, seconds in silent_s.items() if seconds > late_s}
        waits_for = list[str]()
        if state.finished(config):
            word = FINISHED
        elif state.run.why:
            word = state.run.state
        elif config.metadata.publishes:
            word = RUNS if holders[0] else LACKS_LEARNER
        elif state.members and all(m.state == "gone" or m.worker in ended for m in state.members.values()):
            word = ALL_LEFT
        elif Waits.for_joins(state, config) or not (silent_s or backlog or planned):
            word = LACKS_WORKERS
        elif not any(holders):
            word = LACKS_AGGREGATOR
        else:
            waits_for = Waits(state, config).stalled_by(silent)
            word = STALLED if waits_for else RUNS
        return cls(
            at_s=at_s,
            state=word,
            why="" if state.run.reason == LEARNER_HAS_FINISHED and config.metadata.publishes else state.run.why,
            waits_for=waits_for,
            workers=0 if config.metadata.publishes else config.workers,
            backlog=whole(backlog, "the length of the inbox"),
            holders=[holder or "" for holder in holders],
            terms=[_holders_so_far(term, shard) for shard, term in enumerate(terms)],
            backups=whole(backups or 0, "the number of backup tasks"),
            silent_s=silent_s,
            ended=ended,
            silent=silent,
        )


def _silent_s(beats: Sequence[Any], state: State, now_s: float) -> dict[str, float]:
    """Return the seconds since the last sign of life of each active worker; `beats` is worker, ms, worker, ms, ..."""
    return {
        worker: max(0.0, now_s - number(ms, f"the last sign of life of worker {worker!r}") / 1000)
        for worker, ms in pairs(beats)
        if worker in state.members and state.members[worker].active
    }


def _ended(config: JobConfig, state: State) -> set[str]:
    """Return the active workers whose process has certainly ended, if the command that launched them has."""
    launched = config.metadata.launcher
    if not launched or not launched.is_dead:
        return set()
    return {m.worker for m in state.members.values() if m.active and process.is_dead(m.process)}


def _holders_so_far(term: str | None, shard: int) -> int:
    """Return how many holders a shard has had: its term counts them. Raises CorruptData."""
    parts = (term or "").split("-")
    return whole(parts[1], f"the term of shard {shard}") if len(parts) == 3 else 0


def pairs(flat: Sequence[Any]) -> list[tuple[str, Any]]:
    """Return the members of a sorted set with their scores."""
    return list(zip(flat[::2], flat[1::2], strict=True))


def computing(state: State) -> dict[str, int]:
    """Return worker -> the unit of data that it computes. Raises CorruptData."""
    return {
        worker: whole(unit, "a unit of data")
        for unit, entry in state.units.items()
        for worker, _, does in (part.partition(" ") for part in entry.split(", "))
        if does == "computes"
    }


class Waits:
    """Which worker of a job waits for which, by its state alone."""

    def __init__(self, state: State, config: JobConfig) -> None:
        self._config = config
        self._version = state.version
        self._awaits_joins = self.for_joins(state, config)
        self._units = computing(state) if config.unit_rounds else {}
        self._for_units = self._late_units(state, config.unit_rounds) if config.unit_rounds else []
        self._members = state.members
        present = [m for m in state.members.values() if m.state != "gone"]
        self._pushed = {m.worker: m.round + m.pending for m in present if m.state != "draining"}
        self._slowest_first = sorted((pushed, worker) for worker, pushed in self._pushed.items())
        self._lowest = min((m.round for m in present), default=0)
        self._late: dict[int, list[str]] = {}  # round -> the workers that have not pushed it: a thousand ask for few

    @staticmethod
    def for_joins(state: State, config: JobConfig) -> bool:
        """Return whether a job makes no version before more workers have joined. Where versions are made of rounds of
        units, only the first one waits for them."""
        return len(state.members) < config.workers and not (config.unit_rounds and state.version)

    def of(self, m: Member) -> list[str]:
        """Return whom a worker waits for, slowest first, if it may not begin its next round yet."""
        done, staleness = m.round + m.pending, self._config.staleness
        if done and self._awaits_joins:
            return [OTHERS]
        if self._config.unit_rounds:
            return [] if m.worker in self._units else self._for_units
        if self._config.partial_rounds:
            waits = m.pending or self._version < done
            return self._without_push(done) or [AGGREGATOR] if waits else []
        if not self._pushed or admits(done, [self._lowest], staleness):  # the lowest decides
            return []
        return self._without_push(done - staleness) or [AGGREGATOR]

    def round_of(self, m: Member) -> int:
        """Return the round that a worker is in: see `kvps.staleness`. Where rounds are of units, it is the round of the
        unit that it computes, or else the open one."""
        if rounds := self._config.unit_rounds:
            return rounds.round_of(self._units[m.worker]) if m.worker in self._units else self._version
        return m.round + m.pending + (not self.of(m))

    def rounds(self) -> dict[str, int]:
        """Return the round of each worker that is in the job, or is awaited."""
        return {worker: self.round_of(self._members[worker]) for worker in self._pushed}

    def stalled_by(self, silent: Collection[str]) -> list[str]:
        """Return the workers without which nothing moves, slowest first, of these silent ones and those that have not
        come back; none if another worker is at work, or waits for anything else."""
        absent = {m.worker for m in self._members.values() if m.state == "rejoining"} | set(silent)
        active = [m for m in self._members.values() if m.active]
        there = [m for m in active if m.worker not in absent]
        if self._config.partial_rounds:
            if sum(m in there or m.pending > 0 for m in active) >= self._config.quorum:
                return []
        elif any(absent.isdisjoint(self.of(m)) for m in there):
            return []
        waited_for = absent & set[str]().union(*map(self.of, active))
        return sorted(waited_for or absent, key=lambda worker: (self._pushed[worker], worker))

    def _late_units(self, state: State, rounds: UnitRounds) -> list[str]:
        """Return whom a worker without a unit waits for: the workers that compute one of the open round."""
        handed_out = int(state.units.get("next", 0))
        if handed_out < rounds.units_of(state.version + self._config.staleness).stop or "free" in state.units.values():
            return []
        of_round = rounds.units_of(state.version)
        late = sorted((unit, worker) for worker, unit in self._units.items() if unit in of_round)
        return [worker for _, worker in late] or [AGGREGATOR]

    def _without_push(self, round_: int) -> list[str]:
        """Return the workers that have not pushed a round, slowest first."""
        if round_ not in self._late:
            self._late[round_] = [worker for pushed, worker in self._slowest_first if pushed < round_]
        return self._late[round_]
