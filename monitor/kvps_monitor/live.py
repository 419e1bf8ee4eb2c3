"""A job as it is now: what each worker does and whom it waits for, who holds each shard, and how fast it goes.

Everything is read from Redis, and nothing is written. Times are the server's, so that clocks of hosts do not matter.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from kvps.config import JobConfig
from kvps.history.events import Event, EventLog
from kvps.job import Job
from kvps.parsing import number, whole
from kvps.protocol.job_state import Member, State
from kvps.session.heartbeat import interval_s
from kvps.staleness import admits
from kvps_monitor.spans import Iteration, ShardVersion, Traces, gradient_norms, mean
from kvps_monitor.views import JobView, ShardView, WorkerView

KEPT = 60
"""How many iterations of a worker, and versions of a shard, the figures of a view are taken over."""
JOB_WORDS = FINISHED, LACKS_WORKERS, LACKS_AGGREGATOR, RUNS = (
    "finished",
    "waits for workers",
    "waits for an aggregator",
    "runs",
)
"""What a job may be doing, in a few words."""
_AT_FIRST = 6_000  # entries of all workers' traces that the first look reads: a reply of more takes seconds to parse
_LEAST = 4  # of each worker, however many there are
_NAMED = 4  # of the workers that a worker waits for, so many are named
_LATE = 1.6  # a worker is silent after so many intervals between two signs of life
_WINDOW_S = 10.0
_LOOKS = 3  # an aggregator that has missed so many looks is not there
_AGGREGATOR = "the aggregator"
_OTHERS = "workers that have not joined"


class _Reply(NamedTuple):
    """What is read beside the state and the traces, at one instant. `beats` is worker, score, worker, score, ..."""

    beats: Sequence[Any]
    activity: dict[str, str]
    backlog: int
    holders: Sequence[str | None]
    terms: Sequence[str | None]
    aggregators: Sequence[Any]


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

    def look(self) -> JobView:
        """Return the job as it is now. Raises JobNotFound, CorruptData, ServerLost."""
        job, state = self.job, self.job.state()
        self._read_traces(list(state.members))
        reply, events = self._ask(), EventLog(job.access.client, job.access.keys).newest(self._events)
        now_us = round(1e6 * job.access.server.seconds())
        used, limit = job.access.server.memory()
        rate = self._versions_per_s(0, now_us)
        shards = [self._shard(number, reply, now_us) for number in range(job.layout.shards)]
        workers = _Workers(job, state, reply, now_us, self._iterations, events).views()
        losses = [w.loss for w in workers if w.loss is not None]
        return JobView(
            job=job.name,
            at_ms=now_us // 1000,
            task=job.config.task,
            mode=job.config.mode,
            staleness=job.config.staleness,
            transport=job.config.transport,
            optimizer=str(job.config.optimizer),
            state=job_word(state, job.config, bool(reply.beats or reply.backlog), any(reply.holders)),
            version=state.version,
            head=state.head,
            backlog=reply.backlog,
            commits_per_s=rate,
            contributions=sum(state.clock.values()),
            loss=_finite(mean(losses)) if losses else None,
            gradient_norms=gradient_norms(list(self._versions.values())),
            units=job.config.units,
            units_done=state.units_done,
            progress=_progress(state, job.config),
            elapsed_s=self._elapsed_s(state, now_us / 1e6),
            eta_s=_eta(state, job.config, workers),
            memory=used,
            memory_limit=limit,
            model_bytes=job.layout.nbytes,
            expected_workers=job.config.workers,
            workers=workers,
            shards=shards,
            standbys=self._standbys(reply, now_us),
            events=events,
        )

    def kept(self) -> tuple[dict[str, list[Iteration]], dict[int, list[ShardVersion]]]:
        """Return copies of the last iterations of each worker and versions of each shard, oldest first, as of the last
        look. There are `KEPT` of each at the most."""
        return {w: list(kept) for w, kept in self._iterations.items()}, {n: list(v) for n, v in self._versions.items()}

    def _read_traces(self, workers: list[str]) -> None:
        iterations, versions = self._traces.read(workers)
        for worker, new in iterations.items():
            self._iterations.setdefault(worker, deque(maxlen=KEPT)).extend(new)
        for shard, made in versions.items():
            self._versions.setdefault(shard, deque(maxlen=KEPT)).extend(made)

    def _ask(self) -> _Reply:
        keys, shards = self.job.access.keys, range(self.job.layout.shards)
        replies = self.job.access.client.together(
            [
                ("ZRANGE", keys.heartbeat, 0, -1, "WITHSCORES"),
                ("HGETALL", keys.activity),
                ("XLEN", keys.inbox),
                ("MGET", *(keys.lease(shard) for shard in shards)),
                ("MGET", *(keys.term(shard) for shard in shards)),
                ("ZRANGE", keys.aggregators, 0, -1, "WITHSCORES"),
            ]
        )
        return _Reply(*replies)

    def _shard(self, shard: int, reply: _Reply, now_us: int) -> ShardView:
        versions = self._versions.get(shard) or deque()
        recent = _recent(versions, now_us)
        seconds = (now_us - recent[0].at_us) / 1e6 if recent else math.inf
        phases = (
            {name: sum(v.phases[name] for v in recent) / len(recent) for name in recent[0].phases} if recent else {}
        )
        return ShardView(
            shard=shard,
            holder=reply.holders[shard] or "",
            term=holders_so_far(reply.terms[shard], shard),
            commits_per_s=self._versions_per_s(shard, now_us),
            phases=phases,
            received_per_s=sum(v.received for v in recent) / seconds,
            stored_per_s=sum(v.stored for v in recent) / seconds,
        )

    def _versions_per_s(self, shard: int, now_us: int) -> float | None:
        versions = self._versions.get(shard) or deque()
        return _rate([(v.at_us, v.at_us + 1000 * sum(v.phases.values())) for v in versions], now_us)

    def _elapsed_s(self, state: State, now_s: float) -> float | None:
        self._began_s = self._began_s or self.job.training_began()
        if not state.finished(self.job.config):
            self._took_s = None
            return self._began_s and max(0.0, now_s - self._began_s)
        self._took_s = self.job.training_seconds() if self._took_s is None else self._took_s
        return self._took_s

    def _standbys(self, reply: _Reply, now_us: int) -> list[str]:
        """Return the aggregators that have looked at the job lately, and hold no shard."""
        since_ms = now_us / 1000 - _LOOKS * 1000 * self.job.config.lease_look_s
        there = [str(who) for who, at in _pairs(reply.aggregators) if number(at, "an aggregator's look") > since_ms]
        return sorted(set(there) - set(reply.holders))


class _Workers:
    """The workers of a job at one instant."""

    def __init__(
        self,
        job: Job,
        state: State,
        reply: _Reply,
        now_us: int,
        iterations: dict[str, deque[Iteration]],
        events: list[Event],
    ) -> None:
        self._config = job.config
        self._state = state
        self._now_us = now_us
        self._iterations = iterations
        self._beats = {worker: 1000 * number(at, "a sign of life") for worker, at in _pairs(reply.beats) if worker}
        self._activity = reply.activity
        self._staleness = _newest_staleness(events)
        self._pushed = {m.worker: m.round + m.pending for m in state.members.values() if m.active}
        self._committed = {m.worker: m.round for m in state.members.values() if m.state != "gone"}
        self._lowest = min(self._committed.values(), default=0)

    def views(self) -> list[WorkerView]:
        """Return a view of each worker, by rank."""
        return [self._view(m) for m in sorted(self._state.members.values(), key=lambda m: m.rank)]

    def _view(self, m: Member) -> WorkerView:
        recent = _recent(self._iterations.get(m.worker) or deque(), self._now_us)
        spans = [(i.at_us or 0, (i.at_us or 0) + 1000 * i.milliseconds) for i in recent if i.at_us]
        seconds = (max(self._now_us, spans[-1][1]) - spans[0][0]) / 1e6 if spans else math.inf
        total = sum(i.milliseconds for i in recent)
        silent_s = self._silent_s(m)
        state, state_s, waits_for = self._doing(m, silent_s)
        losses = [(i.round, _finite(i.loss)) for i in recent if i.loss is not None]
        pushed = m.round + m.pending
        return WorkerView(
            worker=m.worker,
            rank=m.rank,
            state=state,
            state_s=state_s,
            waits_for=waits_for,
            pushed=pushed,
            committed=m.round,
            clock=m.clock,
            ahead=max(0, pushed - self._lowest) if m.active else 0,
            behind=max([pushed, *self._pushed.values()]) - pushed,
            staleness=self._staleness.get(m.worker),
            silent_s=silent_s,
            round_ms=_median([i.milliseconds for i in recent if i.at_us]),
            rounds_per_s=_rate(spans, self._now_us),
            shares={p: sum(i.phases[p] for i in recent) / total for p in recent[0].phases} if total else {},
            pulled_per_s=sum(i.pulled for i in recent) / seconds if m.active else 0.0,
            pushed_per_s=sum(i.pushed for i in recent) / seconds if m.active else 0.0,
            loss=losses[-1][1] if losses else None,
            losses=losses,
            host=m.host,
            pid=m.pid,
            device=m.device,
        )

    def _silent_s(self, m: Member) -> float | None:
        beat = self._beats.get(m.worker) if m.active else None
        return None if beat is None else max(0.0, (self._now_us - beat) / 1e6)

    def _doing(self, m: Member, silent_s: float | None) -> tuple[str, float | None, list[str]]:
        """Return a worker's state, for how long it has had it, and whom it waits for."""
        if not m.active:
            gone = "evicted" if m.evicted else "finished" if m.finished else "left"
            return ("rejoining" if m.state == "rejoining" else gone), None, []
        if silent_s is None:
            return "awaited", None, []
        if silent_s > _LATE * interval_s(self._config.worker_timeout_ms):
            return "silent", silent_s, []
        phase, since_s = self._last_phase(m.worker)
        if others := self._awaited_by(m):
            return "waiting", since_s if phase == "wait" else None, others
        word = {"fetch": "fetching", "push": "pushing"}.get(phase, "computing")
        return word, since_s if phase != "wait" else None, []

    def _awaited_by(self, m: Member) -> list[str]:
        """Return whom a worker waits for, if it may not begin its next round yet."""
        done, staleness = m.round + m.pending, self._config.staleness
        if done and len(self._state.members) < self._config.workers:
            return [_OTHERS]
        if self._config.partial_rounds:
            return self._without_push(done) or [_AGGREGATOR] if m.pending else []
        if not self._committed or admits(done, [self._lowest], staleness):  # the lowest decides
            return []
        return self._without_push(done - staleness) or [_AGGREGATOR]

    def _without_push(self, round_: int) -> list[str]:
        """Return the workers that have not pushed a round, slowest first."""
        late = sorted((pushed, worker) for worker, pushed in self._pushed.items() if pushed < round_)
        return [worker for _, worker in late[:_NAMED]]

    def _last_phase(self, worker: str) -> tuple[str, float | None]:
        """Return the phase that a worker was in at its last sign of life, and for how long; "" if that is not known, or
        its iteration has ended since."""
        phase, _, since = self._activity.get(worker, "").partition(" ")
        if not since.isdecimal() or len(since) > 16:
            return "", None
        last = (self._iterations.get(worker) or [None])[-1]
        if last and last.at_us and int(since) < last.at_us + 1000 * last.milliseconds:
            return "", None
        return phase, max(0.0, (self._now_us - int(since)) / 1e6)


def job_word(state: State, config: JobConfig, at_work: bool, held: bool) -> str:
    """Return what a job is doing, in a few words. `at_work` says whether a worker gives signs of life or a contribution
    waits for its commit, and `held` whether an aggregator holds a shard."""
    if state.finished(config):
        return FINISHED
    if len(state.members) < config.workers or not at_work:
        return LACKS_WORKERS
    return RUNS if held else LACKS_AGGREGATOR


def holders_so_far(term: str | None, shard: int) -> int:
    """Return how many holders a shard has had: its term counts them. Raises CorruptData."""
    parts = (term or "").split("-")
    return whole(parts[1], f"the term of shard {shard}") if len(parts) == 3 else 0


def _newest_staleness(events: list[Event]) -> dict[str, int]:
    """Return the staleness of the last committed contribution of each worker in the events."""
    return {
        c["worker"]: c["staleness"] for event in events if event.kind == "commit" for c in event.facts["contributions"]
    }


def _pairs(flat: Sequence[Any]) -> list[tuple[str, Any]]:
    return list(zip(flat[::2], flat[1::2], strict=True))


def _recent(kept: Any, now_us: int) -> list[Any]:
    """Return what was recorded in the last ten seconds; if that is less than two entries, all that is kept."""
    recent = [each for each in kept if each.at_us and now_us - each.at_us < 1e6 * _WINDOW_S]
    return recent if len(recent) > 1 else list(kept)


def _rate(spans: Sequence[tuple[float, float]], now_us: int) -> float | None:
    """Return how many of these spans, start and end in microseconds, there are in a second. If the present one takes
    longer than two of them, the time up to now counts too."""
    if len(spans) < 2:
        return None
    began, ended = spans[0][0], spans[-1][1]
    if now_us - ended > 2 * (ended - began) / len(spans):
        ended = now_us
    return 1e6 * len(spans) / (ended - began) if ended > began else None


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
    if not config.rounds:
        return None
    return sum(min(m.round, config.rounds) for m in state.members.values()) / (config.rounds * config.workers)


def _eta(state: State, config: JobConfig, workers: Sequence[WorkerView]) -> float | None:
    """Return the time that what is left takes: units at the rate of all workers, rounds at that of the slowest."""
    at_work = [w for w in workers if w.state in ("computing", "fetching", "pushing", "waiting")]
    rates = [w.rounds_per_s for w in at_work if w.rounds_per_s]
    if not rates or len(rates) < len(at_work):
        return None
    if config.units:
        return (config.units - state.units_done) / sum(rates)
    if not config.rounds:
        return None
    return max((config.rounds - w.committed) / (w.rounds_per_s or math.inf) for w in at_work)
