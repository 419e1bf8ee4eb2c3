"""`kvps_bench wake`: from a commit until a blocked worker is awake, against a bare XREAD BLOCK woken by an XADD.

Both times begin just before the writing call is sent: `ready.lua`, whose last call commits, or `XADD`. The worker's
time is taken twice: when its XREAD has returned, with the state and the weights behind it, and when `pull` has. One
worker is blocked; the other pushes, then sleeps and disturbs nothing. All processes read the same monotonic clock.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import redis

from kvps.arrays.layout import DTYPE
from kvps.connection.sockets import connection_settings
from kvps.job import Job
from kvps_bench.crew import Member, Place, crew
from kvps_bench.result import Bar, Result, Row, machine
from kvps_bench.roles import Aggregator, Worker, temporary_job
from kvps_bench.turns import Times, in_turns

_PATIENCE_S = 120.0
_GAP_S = 0.004  # the wait before a commit, after which the other worker is certainly blocked
_WAKES, _QUICK_WAKES = 200, 20
_BARE, _XREAD, _WHOLE, _CALL, _ADD = (
    "bare XREAD, woken by XADD",
    "kvps, state and weights arrived",
    "kvps, pull returned",
    "kvps, ready.lua answered",
    "bare XADD answered",
)


class Stamps:
    """A wrapper of an object's method that records when each call began and returned, in ns."""

    def __init__(self, owner: Any, method: str) -> None:
        self.spans: list[tuple[int, int]] = []
        self._call = getattr(owner, method)
        setattr(owner, method, self)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        began = time.monotonic_ns()
        try:
            return self._call(*arguments, **named)
        finally:
            self.spans.append((began, time.monotonic_ns()))


class Committer(Aggregator):
    """An aggregator that records each call that stores a version and runs ready.lua: with one shard, each commits."""

    def _find(self, name: str) -> Job:
        job = super()._find(name)
        self._job, self._ready = job, Stamps(job.access.client, "put_and_call")
        return job

    def spans(self) -> list[tuple[int, int]]:
        """Return when the call of each commit so far was made, and when it was answered, in ns."""
        # Before the first commit there may be calls that load the script into the server.
        return self._ready.spans[-self._job.state().version :]


class Sleeper(Worker):
    """A worker that pushes at once and is then blocked until the next commit."""

    def __init__(self, url: str, job: str, rank: int) -> None:
        super().__init__(url, job, rank)
        self._wait = Stamps(self.store.client, "wait_and_read")

    def wakes(self, number: int) -> list[tuple[int, int, int]]:
        """Return for each wake-up the version, when XREAD returned, and when pull returned, in ns."""
        woken = []
        self._session.pull()
        for _ in range(number):
            self._session.push(self._gradients)
            before = len(self._wait.spans)
            self._session.pull()
            now = time.monotonic_ns()
            if len(self._wait.spans) > before:  # otherwise pull did not block
                woken.append((self._session.version, self._wait.spans[-1][1], now))
        return woken


class Waker(Worker):
    """The worker whose push comes last, so that the commit follows it."""

    def pushes(self, number: int) -> None:
        """Push `number` times, each time a while after the other worker has been blocked."""
        for _ in range(number):
            self._session.pull()
            time.sleep(_GAP_S)
            self._session.push(self._gradients)
            time.sleep(_GAP_S / 2)  # sleep while the other worker wakes up


class Stream:
    """A redis-py client that writes or reads one stream."""

    def __init__(self, url: str, name: str) -> None:
        settings = connection_settings(url) | {"decode_responses": True}
        kind = {"unix": redis.UnixDomainSocketConnection, "rediss": redis.SSLConnection}
        pool = redis.ConnectionPool(connection_class=kind.get(url.split(":", 1)[0], redis.Connection), **settings)
        self._redis: Any = redis.Redis(connection_pool=pool)
        self._name, self._last = name, "0-0"

    def adds(self, number: int) -> list[tuple[int, int]]:
        """Call XADD `number` times; return when each call was made and answered, in ns."""
        spans = []
        time.sleep(0.3)  # the first XADD should find the reader blocked
        for _ in range(number):
            time.sleep(1.5 * _GAP_S)
            began = time.monotonic_ns()
            self._redis.execute_command("XADD", self._name, "MAXLEN", 100, "*", "kind", "commit")
            spans.append((began, time.monotonic_ns()))
        return spans

    def wakes(self, number: int) -> list[int]:
        """Call XREAD `number` times; return when each call returned, in ns."""
        woken: list[int] = []
        until = time.monotonic() + _PATIENCE_S
        while len(woken) < number:
            # Not "$", and one at a time: an entry that was added before this call must not be missed.
            command = ("XREAD", "COUNT", 1, "BLOCK", 2000, "STREAMS", self._name, self._last)
            if not (reply := self._redis.execute_command(*command)):
                if time.monotonic() > until:
                    raise RuntimeError(f"nothing was added to {self._name} for {_PATIENCE_S:g} s")
                continue
            woken.append(time.monotonic_ns())
            ((_, entries),) = reply.items() if isinstance(reply, dict) else reply
            self._last, until = entries[-1][0], time.monotonic() + _PATIENCE_S
        return woken

    def clear(self) -> None:
        self._redis.delete(self._name)

    def close(self) -> None:
        self._redis.close()


def measure(place: Place, transports: Sequence[str], turns: int, quick: bool = False) -> Result:
    """Measure wake-ups over each transport."""
    rows: list[Row] = []
    bars: list[Bar] = []
    number = _QUICK_WAKES if quick else _WAKES
    for transport in transports:
        times = _measured(place, place.urls[transport], turns, number)
        rows += [Row(name, transport, {}, of_case) for name, of_case in times.items()]
        bars += _bars(transport, times)
    return Result("wake", turns, rows, bars, machine(place.store.client), _NOTES)


_NOTES = (
    "Each time begins just before the writing call is sent; `answered` is when its caller has the reply. Part of "
    "ready.lua's time lies before the commit, because the script first makes all its checks. XADD makes none.",
    "A worker sends one request: XREAD, a MULTI that reads version, clock, members and units, and the GETs of a small "
    "model's weights. The server answers all of it when the stream gets an entry. The stream only wakes the worker; "
    "the hashes hold the state.",
)


def _measured(place: Place, url: str, turns: int, number: int) -> dict[str, Times]:
    with temporary_job(place, "unix", {"w": np.zeros(1, DTYPE)}, workers=2) as job:
        stream = f"bench-{secrets.token_hex(4)}"
        makers = [(Committer, url, job.name), (Sleeper, url, job.name, 0), (Waker, url, job.name, 1)]
        with crew(*makers, (Stream, url, stream), (Stream, url, stream)) as members:
            both = _Both(members, number)
            in_turns({"bare": both.bare, "kvps": both.kvps}, turns)
            members[-1]("clear")
    return {name: Times(tuple(times[1:])) for name, times in both.times.items()}


class _Both:
    """The two cases, each of which takes more than one time."""

    def __init__(self, members: Sequence[Member], number: int) -> None:
        self._committer, self._sleeper, self._waker, self._adds, self._reads = members
        self._number = number
        self.times: dict[str, list[tuple[float, ...]]] = {n: [] for n in (_BARE, _XREAD, _WHOLE, _ADD, _CALL)}

    def bare(self) -> Sequence[float]:
        self._reads.begin("wakes", self._number)
        spans = self._adds("adds", self._number)
        woken = self._reads.end()
        self._note(_ADD, [end - begin for begin, end in spans])
        return self._note(_BARE, [woken_at - begin for woken_at, (begin, _) in zip(woken, spans, strict=True)])

    def kvps(self) -> Sequence[float]:
        self._sleeper.begin("wakes", self._number)
        self._waker("pushes", self._number)
        woken = self._sleeper.end()
        last = max(version for version, _, _ in woken)
        while len(spans := self._committer("spans")) < last:  # the worker is woken before the committer notes its time
            time.sleep(0.001)
        began = {version: spans[version - 1] for version, _, _ in woken}
        self._note(_CALL, [began[version][1] - began[version][0] for version, _, _ in woken])
        self._note(_XREAD, [woken_at - began[version][0] for version, woken_at, _ in woken])
        return self._note(_WHOLE, [woken_at - began[version][0] for version, _, woken_at in woken])

    def _note(self, name: str, nanoseconds: list[int]) -> Sequence[float]:
        self.times[name].append(tuple(ns / 1e9 for ns in nanoseconds))
        return self.times[name][-1]


def _bars(transport: str, times: dict[str, Times]) -> list[Bar]:
    bare = times[_BARE]
    return [
        Bar(12, f"{name} over {_BARE}, p{round(100 * q)}, {transport}", True, 1.5, times[name].over(bare, q))
        for name in (_XREAD, _WHOLE)
        for q in (0.5, 0.99)
    ]
