"""`kvps_bench transport`: push and pull of one array through kvps, against redis-py's set and get of the same array."""

from __future__ import annotations

import importlib.util
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import redis
from redis._parsers import _HiredisParser, _RESP2Parser
from redis.connection import ConnectionPool, PythonRespSerializer

from kvps.arrays.digest import view
from kvps.arrays.layout import DTYPE
from kvps.config import JobConfig
from kvps.connection.sockets import connection_settings
from kvps_bench.bare import Socket
from kvps_bench.crew import Member, Place, crew
from kvps_bench.result import NOT_INSTALLED, Bar, Figures, Result, Row, machine
from kvps_bench.roles import Role, model
from kvps_bench.turns import Case, Times, in_turns

_REPEATS = 6  # per turn: the server must hold as many gradients, because no aggregator commits them


class Mover(Role):
    """A worker of an ASP job without an aggregator: its pushes are stored and accepted, and wait in the inbox."""

    def __init__(self, url: str, nbytes: int) -> None:
        super().__init__(url)
        self._nbytes = nbytes
        self._gradients = {name: np.full_like(array, 1) for name, array in model(nbytes).items()}

    def push(self, number: int) -> list[float]:
        """Return the seconds of each of `number` pushes: stored, confirmed, accepted."""
        # As many untimed pushes go first. kvps takes fresh names, and a running job's server has memory of older ones.
        self._both(number)
        return [pushed for pushed, _ in self._both(number)]

    def pull(self, number: int) -> list[float]:
        """Return the seconds of each of `number` pulls, which read the state, and the weights into the array."""
        return [pulled for _, pulled in self._both(number)]

    def _both(self, number: int) -> list[tuple[float, float]]:
        # Each turn has its own job, removed after it. Otherwise the pushed gradients would fill the server.
        config = JobConfig(staleness=number - 1, workers=1)  # so many may wait
        job = self.store.create_job(f"bench-{secrets.token_hex(4)}", model(self._nbytes), config=config)
        took = []
        try:
            with job.join("w0") as session:
                for _ in range(number):
                    began = time.perf_counter()
                    session.pull()
                    pulled = time.perf_counter()
                    session.push(self._gradients)
                    took.append((time.perf_counter() - pulled, pulled - began))
        finally:
            self.store.remove_job(job.name)
        return took


class Bare:
    """Plain sockets that only carry the bytes, in the same chunks and under fresh names, as kvps does."""

    def __init__(self, url: str, nbytes: int) -> None:
        self._socket = Socket(url)
        self._array = np.full(nbytes // DTYPE.itemsize, 1, DTYPE)
        self._prefix = f"bench-{secrets.token_hex(4)}"
        self._socket.set(self._prefix, self._array)

    def push(self, number: int) -> list[float]:
        """Return the seconds of each of `number` SETs of the array, each under another name, after as many untimed."""
        took: list[float] = []
        for _ in range(2):
            took = [_seconds(partial(self._socket.set, f"{self._prefix}:{n}", self._array)) for n in range(number)]
            for n in range(number):
                self._socket.unlink(f"{self._prefix}:{n}", self._array)
        return took

    def pull(self, number: int) -> list[float]:
        """Return the seconds of each of `number` GETs into the array."""
        return [_seconds(partial(self._socket.get, self._prefix, self._array)) for _ in range(number)]

    def close(self) -> None:
        self._socket.unlink(self._prefix, self._array)
        self._socket.close()


def _seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


class RedisPy:
    """redis-py as it is, with one of its two parsers; the array is one value."""

    def __init__(self, url: str, nbytes: int, hiredis: bool) -> None:
        settings = connection_settings(url) | {"parser_class": _HiredisParser if hiredis else _RESP2Parser}
        if not hiredis:  # where hiredis is installed, redis-py would still pack commands with it
            settings["command_packer"] = PythonRespSerializer(6000, _encoded)
        kind = {"unix": redis.UnixDomainSocketConnection, "rediss": redis.SSLConnection}
        pool = ConnectionPool(connection_class=kind.get(url.split(":", 1)[0], redis.Connection), **settings)
        self._redis: Any = redis.Redis(connection_pool=pool)
        self._array = np.full(nbytes // DTYPE.itemsize, 1, DTYPE)
        self._key = f"bench-{secrets.token_hex(4)}"
        self._redis.set(self._key, view(self._array))

    def push(self, number: int) -> list[float]:
        """Return the seconds of each of `number` calls of `set` with one name."""
        return [_seconds(lambda: self._redis.set(self._key, view(self._array))) for _ in range(number)]

    def pull(self, number: int) -> list[float]:
        """Return the seconds of each of `number` calls of `get`; viewing the bytes as an array costs nothing."""
        took = []
        for _ in range(number):
            began = time.perf_counter()
            got = np.frombuffer(self._redis.get(self._key), DTYPE)
            took.append(time.perf_counter() - began)
            assert got[-1] == 1
        return took

    def close(self) -> None:
        self._redis.unlink(self._key)
        self._redis.close()


def _encoded(value: Any) -> bytes | memoryview:
    return value if isinstance(value, bytes | memoryview) else str(value).encode()


def measure(place: Place, transports: Sequence[str], nbytes: int, turns: int) -> Result:
    """Measure push and pull of `nbytes` bytes over each transport."""
    rows: list[Row] = []
    bars: list[Bar] = []
    for transport in transports:
        times = _measured(place.urls[transport], nbytes, turns)
        shown = [key for key in _KEYS if key in times or key[1] == _FAST]
        rows += [_row(transport, nbytes, move, name, times.get((move, name))) for move, name in shown]
        bars += [_bar(transport, move, times) for move in _MOVES]
    return Result("transport", turns, rows, bars, machine(place.store.client), _NOTES)


_BARE, _PLAIN, _FAST = "bare sockets", "redis-py", "redis-py, hiredis"
_MOVES = {"push": 2.5, "pull": 5.0}  # move -> its bar
Key = tuple[str, str]
"""Move and case."""
_KEYS: list[Key] = [(move, name) for move in _MOVES for name in ("kvps", _BARE, _PLAIN, _FAST)]
_NOTES = (
    "kvps is a worker's session: its pull also reads the state; its push computes digests, waits for every OK, and is "
    "accepted. redis-py sets and gets the array as one value, always under the same name. Bare sockets show the least "
    "that the bytes cost, in kvps's chunks.",
)


def _measured(url: str, nbytes: int, turns: int) -> dict[Key, Times]:
    makers: dict[str, tuple[Any, ...]] = {"kvps": (Mover, url, nbytes), _PLAIN: (RedisPy, url, nbytes, False)}
    if not url.startswith("rediss:"):
        makers[_BARE] = (Bare, url, nbytes)
    if importlib.util.find_spec("hiredis"):
        makers[_FAST] = (RedisPy, url, nbytes, True)
    with crew(*makers.values()) as started:
        members = dict(zip(makers, started, strict=True))
        keys = [(move, name) for move, name in _KEYS if name in members]
        return in_turns({key: _case(members[key[1]], key[0]) for key in keys}, turns)


def _case(member: Member, move: str) -> Case:
    return lambda: member(move, _REPEATS)


def _row(transport: str, nbytes: int, move: str, name: str, times: Times | None) -> Row:
    settings: Figures = {"move": move, "mb": nbytes / 1e6}
    if times is None:
        return Row(name, transport, settings, why=NOT_INSTALLED)
    return Row(name, transport, settings, times, {"gb_per_s": round(nbytes / times.median / 1e9, 3)})


def _bar(transport: str, move: str, times: Mapping[Key, Times]) -> Bar:
    """Compare kvps with the faster of redis-py's parsers, of those that are installed."""
    best = min((times[move, name] for name in (_PLAIN, _FAST) if (move, name) in times), key=lambda t: t.median)
    what = f"{move}: how much faster than the better redis-py, {transport}"
    return Bar(1, what, False, _MOVES[move], best.over(times[move, "kvps"]))
