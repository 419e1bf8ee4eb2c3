"""A job as it is now: what each worker does and whom it waits for, who holds each shard, and how fast it goes.

Everything is read from Redis, and nothing is written. Times are the server's, so that clocks of hosts do not matter.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from kvps.config import JobConfig
from kvps.history.evaluations import Evaluation
from kvps.history.events import Event, EventLog
from kvps.history.log_stream import LogStream
from kvps.job import Job
from kvps.parsing import number
from kvps.protocol.job_state import Member, State
from kvps_monitor.job_now import FINISHED, NAMED, RUNS, JobNow, Waits, pairs
from kvps_monitor.rates import WINDOW_S, Lately
from kvps_monitor.spans import Iteration, LearnerLosses, ShardVersion, Traces, VersionFigures, WholeVersions, mean
from kvps_monitor.views import WORKING, JobView, ShardView, WorkerView

KEPT = 60
"""How many iterations of a worker, and versions of a shard, the figures of a view are taken over."""
_AT_FIRST = 6_000  # entries of all workers' traces that the first look reads: a reply of more takes seconds to parse
_LEAST = 4  # of each worker, however many there are
_LOOKS = 3  # an aggregator that has missed so many looks is not there


class JobWatch:
    """Looks at one job again and again. Each look reads what is new; the first one reads the newest entries of all
    traces, fewer of each where there are many workers. Used by one thread at a time."""

    def __init__(self, job: Job, events: int = 20) -> None:
        """`events` is how many events of the log a view has."""
        self.job = job
        self._traces = Traces(job, max(_LEAST, min(KEPT, _AT_FIRST // job.config.workers)))
        self._events = events
        self._iterations: dict[str, deque[Iteration]] = {}
        self._versions: dict[int, deque[ShardVersion]] = {}
        self._began_s: float | None = None
        self._took_s: float | None = None  # a finished job
        self._whole = WholeVersions(job.layout.shards)
        self._made = deque[VersionFigures](maxlen=KEPT)
        self._learner = LearnerLosses(job, KEPT)
        self._losses = deque[tuple[int, float]](maxlen=KEPT)  # that it said

    def look(self) -> JobView:
        """Return the job as it is now. Raises JobNotFound, CorruptData, ServerLost."""
        job, state, keys = self.job, self.job.state(), self.job.access.keys
        self._read_traces(list(state.members))
        activity, aggregators, evaluation = job.access.client.together(
            [
                ("HGETALL", keys.activity),
                ("ZRANGE", keys.aggregators, 0, -1, "WITHSCORES"),
                ("HGETALL", keys.evaluation),
            ]
        )
        events = EventLog(job.access.client, keys).newest(self._events)
        used, limit = job.access.server.memory()
        now = JobNow.read(job, state)
        now_us = round(1e6 * now.at_s)
        shards = [self._shard(number, now, now_us) for number in range(job.layout.shards)]
        workers = _Workers(job.config, state, now, activity, self._iterations, now_us).views(_staleness(events))
        self._losses.extend(self._learner.read())
        losses = [w.loss for w in workers if w.loss is not None] or [loss for _, loss in self._losses][-1:]
        return JobView(
            job=job.name,
            at_ms=now_us // 1000,
            task=job.config.metadata.task,
            mode=job.config.mode,
            staleness=job.config.staleness,
            transport=job.config.transport,
            optimizer=job.config.stepped_by,
            state=now.state,
            waits_for=now.waits_for,
            why=now.why,
            version=state.version,
            head=state.head,
            backlog=now.backlog,
            commits_per_s=shards[0].commits_per_s,
            contributions=sum(state.clock.values()),
            loss=mean(losses) if losses else None,
            losses=list(self._losses),
            gradient_norms=[(figures.version, figures.norm) for figures in self._made if figures.contributions],
            units=job.config.units,
            units_done=state.units_done if job.config.units else 0,
            rounds=job.config.unit_rounds.rounds if job.config.unit_rounds else 0,
            backups=now.backups,
            progress=_progress(state, job.config),
            elapsed_s=self._elapsed_s(state, now.at_s),
            eta_s=_eta(state, job.config, workers) if now.state == RUNS else None,
            memory=used,
            memory_limit=limit,
            model_bytes=job.layout.nbytes,
            expected_workers=now.workers,
            workers=workers,
            shards=shards,
            standbys=self._standbys(now, aggregators),
            events=events,
            evaluation=Evaluation.stored(evaluation) if evaluation else None,
            settings=_settings(job.config),
            rollouts=job.rollouts.if_any(),
        )

    def kept(self) -> tuple[dict[str, list[Iteration]], dict[int, list[ShardVersion]]]:
        """Return copies of the last iterations of each worker and versions of each shard, oldest first, as of the last
        look. There are `KEPT` of each at the most."""
        return {w: list(kept) for w, kept in self._iterations.items()}, {n: list(v) for n, v in self._versions.items()}

    def made(self) -> list[VersionFigures]:
        """Return the last versions, oldest first, as of the last look."""
        return list(self._made)

    def _read_traces(self, workers: list[str]) -> None:
        iterations, versions = self._traces.read(workers)
        for worker, new in iterations.items():
            self._iterations.setdefault(worker, deque(maxlen=KEPT)).extend(new)
        for shard, made in versions.items():
            self._versions.setdefault(shard, deque(maxlen=KEPT)).extend(made)
            self._made.extend(self._whole.add(made))

    def _shard(self, shard: int, now: JobNow, now_us: int) -> ShardView:
        versions = list(self._versions.get(shard) or ())
        lately = Lately.of([] if now.state == FINISHED else versions, now_us)
        recent = _recent(versions, now_us)
        return ShardView(
            shard=shard,
            holder=now.holders[shard],
            term=now.terms[shard],
            commits_per_s=lately.per_second() if len(versions) > 1 else None,
            phases={name: mean([v.phases[name] for v in recent]) for name in recent[0].phases} if recent else {},
            received_per_s=lately.per_second("received"),
            stored_per_s=lately.per_second("stored"),
        )

    def _elapsed_s(self, state: State, now_s: float) -> float | None:
        self._began_s = self._began_s or LogStream(self.job.access).training_began()
        if not state.finished(self.job.config):
            self._took_s = None
            return self._began_s and max(0.0, now_s - self._began_s)
        self._took_s = LogStream(self.job.access).training_seconds() if self._took_s is None else self._took_s
        return self._took_s

    def _standbys(self, now: JobNow, looks: Sequence[Any]) -> list[str]:
        """Return the aggregators that have looked at the job lately, and hold no shard."""
        since_ms = 1000 * (now.at_s - _LOOKS * self.job.config.lease_look_s)
        there = [str(who) for who, at in pairs(looks) if number(at, "an aggregator's look") > since_ms]
        return sorted(set(there) - set(now.holders))


class _Workers:
    """The workers of a job at one instant."""

    def __init__(
        self,
        config: JobConfig,
        state: State,
        now: JobNow,
        activity: Mapping[str, str],
        iterations: Mapping[str, deque[Iteration]],
        now_us: int,
    ) -> None:
        self._state = state
        self._now = now
        self._activity = activity
        self._iterations = iterations
        self._now_us = now_us
        self._waits = Waits(state, config)
        self._rounds = self._waits.rounds()
        self._lowest, self._highest = (each(self._rounds.values(), default=0) for each in (min, max))

    def views(self, staleness: Mapping[str, int]) -> list[WorkerView]:
        """Return a view of each worker, by rank; `staleness` is that of its last committed contribution."""
        members = sorted(self._state.members.values(), key=lambda m: m.rank)
        return [self._view(m, staleness.get(m.worker)) for m in members]

    def _view(self, m: Member, staleness: int | None) -> WorkerView:
        kept = list(self._iterations.get(m.worker, ()))
        timed = [i for i in kept if i.at_us]
        recent, lately = _recent(kept, self._now_us), Lately.of(timed if m.active else [], self._now_us)
        total = sum(i.milliseconds for i in recent)
        state, state_s, waits_for = self._doing(m)
        losses = [(i.round, i.loss) for i in kept if i.loss is not None]
        round_ = self._rounds.get(m.worker, m.round)
        return WorkerView(
            worker=m.worker,
            rank=m.rank,
            state=state,
            state_s=state_s,
            waits_for=waits_for,
            pushed=m.round + m.pending,
            committed=m.round,
            clock=m.clock,
            ahead=round_ - self._lowest if m.active else 0,
            behind=max(0, self._highest - round_),
            staleness=staleness,
            silent_s=self._now.silent_s.get(m.worker),
            round_ms=_median([i.milliseconds for i in recent if i.at_us]),
            rounds_per_s=lately.per_second() if len(timed) > 1 else None,
            shares={p: sum(i.phases[p] for i in recent) / total for p in recent[0].phases} if total else {},
            pulled_per_s=lately.per_second("pulled"),
            pushed_per_s=lately.per_second("pushed"),
            loss=losses[-1][1] if losses else None,
            losses=[(number, _finite(loss)) for number, loss in losses],
            host=m.host,
            pid=m.pid,
            device=m.device,
        )

    def _doing(self, m: Member) -> tuple[str, float | None, list[str]]:
        """Return a worker's state, for how long it has had it, and whom it waits for."""
        if not m.active:
            gone = "evicted" if m.evicted else "finished" if m.finished else "left"
            return ("rejoining" if m.state == "rejoining" else gone), None, []
        if m.worker not in self._now.silent_s:
            return "awaited", None, []
        if m.worker in self._now.silent:
            return "silent", self._now.silent_s[m.worker], []
        phase, since_s = self._last_phase(m.worker)
        others = self._waits.of(m)
        if self._state.run.state == "paused" and (others or phase in ("wait", "push")):
            return "paused", None, []
        if others:
            return "waiting", since_s if phase == "wait" else None, others[:NAMED]
        word = {"fetch": "fetching", "push": "pushing"}.get(phase, "computing")
        return word, since_s if phase != "wait" else None, []

    def _last_phase(self, worker: str) -> tuple[str, float | None]:
        """Return the phase that a worker was in at its last sign of life, and for how long; "" if that is not known, or
        its iteration has ended since."""
        phase, _, since = self._activity.get(worker, "").partition(" ")
        if not since.isdecimal() or len(since) > 16:
            return "", None
        last = (self._iterations.get(worker) or [None])[-1]
        if last and last.at_us and int(since) < last.ended_us:
            return "", None
        return phase, max(0.0, (self._now_us - int(since)) / 1e6)


def _settings(config: JobConfig) -> dict[str, str]:
    """Return the settings of a job and what it notes of itself, as people read them."""
    texts = config.to_hash() | {"optimizer": config.stepped_by}
    return {name: text for name, text in texts.items() if name not in ("launched_by", "memory")}


def _staleness(events: list[Event]) -> dict[str, int]:
    """Return the staleness of the last committed contribution of each worker in the events."""
    return {
        c["worker"]: c["staleness"] for event in events if event.kind == "commit" for c in event.facts["contributions"]
    }


def _recent(kept: Any, now_us: int) -> list[Any]:
    """Return what was recorded in the last ten seconds; if that is less than two entries, all that is kept."""
    recent = [each for each in kept if each.at_us and now_us - each.at_us < 1e6 * WINDOW_S]
    return recent if len(recent) > 1 else list(kept)


def _median(values: Sequence[float]) -> float | None:
    return sorted(values)[len(values) // 2] if values else None


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _progress(state: State, config: JobConfig) -> float | None:
    """Return how much of the units, or else of the rounds, is committed; None if their number is not known."""
    if state.finished(config):
        return 1.0
    if config.units:
        return state.units_done / config.units
    if not (rounds := config.metadata.rounds):
        return None
    return sum(min(m.round, rounds) for m in state.members.values()) / (rounds * config.workers)


def _eta(state: State, config: JobConfig, workers: Sequence[WorkerView]) -> float | None:
    """Return the time that what is left takes: units at the rate of all workers, rounds at that of the slowest."""
    at_work = [w for w in workers if w.state in WORKING]
    rates = [w.rounds_per_s for w in at_work if w.rounds_per_s]
    if not rates or len(rates) < len(at_work):
        return None
    if config.units:
        return (config.units - state.units_done) / sum(rates)
    if not (rounds := config.metadata.rounds):
        return None
    return max(0.0, *((rounds - w.committed) / (w.rounds_per_s or math.inf) for w in at_work))  # a script may do more
