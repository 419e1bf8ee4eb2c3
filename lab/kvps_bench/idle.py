"""`kvps_bench idle`: what one `kvps aggregator start` costs while no job has a worker, and how soon it serves a job
that a worker joins.

CPU time is the kernel's count for all threads of a process. Requests are the server's count for all clients, less the
benchmark's own. Linux only.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvps.arrays.layout import DTYPE
from kvps.errors import KvpsError
from kvps.job import Job
from kvps.store import Store
from kvps_bench.crew import ONE_THREAD, Place
from kvps_bench.result import Bar, Result, Row, machine
from kvps_bench.turns import Ratio, Times, in_turns

_WINDOW_S, _QUICK_WINDOW_S = 2.0, 0.6  # longer than any sleep of the aggregator
_AGGREGATOR, _SERVER = "CPU time of the aggregator per second", "CPU time of the server per second"
_IDLE, _SERVED = "an idle job, from join to first commit", "a served job, from join to first commit"
_ONE = {"w": np.ones(1, DTYPE)}
_MOST_OF_A_CORE = 0.05


class _Count(NamedTuple):
    """The seconds of CPU and the requests used up to a moment, and that moment."""

    aggregator: float
    server: float
    requests: int
    at: float


class _Rest:
    """The measurement of the aggregator and the server while no worker joins."""

    def __init__(self, store: Store, aggregator: int, window_s: float) -> None:
        self._store = store
        self._window_s = window_s
        self._aggregator = aggregator
        self._server = int(store.client.call("INFO", "server")["process_id"])
        self.cpu: dict[str, list[tuple[float]]] = {_AGGREGATOR: [], _SERVER: []}
        self.requests: list[float] = []
        self.threads = self.connections = 0

    def turn(self) -> Sequence[float]:
        """Measure both for one window; return its seconds."""
        before = self._count()
        time.sleep(self._window_s)
        after = self._count()
        seconds = after.at - before.at
        self.cpu[_AGGREGATOR].append(((after.aggregator - before.aggregator) / seconds,))
        self.cpu[_SERVER].append(((after.server - before.server) / seconds,))
        self.requests.append((after.requests - before.requests - 1) / seconds)
        self.threads = max(self.threads, len(list(Path(f"/proc/{self._aggregator}/task").iterdir())))
        names = [client["name"] for client in self._store.client.call("CLIENT LIST")]
        self.connections = max(self.connections, sum(name.startswith(f"kvps-{self._aggregator}-") for name in names))
        return [seconds]

    def _count(self) -> _Count:
        requests = int(self._store.client.call("INFO", "stats")["total_commands_processed"])
        return _Count(_cpu_of(self._aggregator), _cpu_of(self._server), requests, time.perf_counter())


def _cpu_of(pid: int) -> float:
    """Return the seconds of CPU that all threads of a process have used, by its clock: see clock_getcpuclockid(3)."""
    return time.clock_gettime((~pid << 3) | 2)


class _Wake:
    """A worker that joins one job after another, each twice: before the first join the job has long been idle."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._jobs = iter(jobs)
        self._job = jobs[0]

    def idle(self) -> Sequence[float]:
        self._job = next(self._jobs)
        return [self._first_commit()]

    def served(self) -> Sequence[float]:
        return [self._first_commit()]

    def _first_commit(self) -> float:
        began = time.perf_counter()
        session = self._job.join()
        session.pull()
        session.push(_ONE)
        session.pull()  # in BSP this waits for the commit
        took = time.perf_counter() - began
        session.leave(finished=False)
        return took


def measure(place: Place, transports: Sequence[str], turns: int, jobs: int, quick: bool = False) -> Result:
    """Measure `jobs` idle jobs over each transport."""
    rows: list[Row] = []
    bars: list[Bar] = []
    for transport in transports:
        made = _idle_jobs(place.store, max(jobs, turns + 1))
        with _aggregator(place.urls[transport], made) as pid:
            rest = _Rest(place.store, pid, _QUICK_WINDOW_S if quick else _WINDOW_S)
            in_turns({"rest": rest.turn}, turns)
            wake = _Wake(made)
            woken = in_turns({_IDLE: wake.idle, _SERVED: wake.served}, turns)
        cpu = {name: Times(tuple(found[1:])) for name, found in rest.cpu.items()}
        requests = round(Times((tuple(rest.requests[1:]),)).median, 1)
        more = {"requests_per_s": requests, "threads": rest.threads, "connections": rest.connections}
        settings = {"jobs": len(made)}
        rows.append(Row(_AGGREGATOR, transport, settings, cpu[_AGGREGATOR], more))
        rows.append(Row(_SERVER, transport, settings, cpu[_SERVER]))
        rows += [Row(name, transport, settings, found) for name, found in woken.items()]
        what = f"of a core, with {len(made)} idle jobs, {transport}"
        bars.append(Bar(13, f"aggregator's share {what}", True, _MOST_OF_A_CORE, _part(cpu[_AGGREGATOR])))
        bars.append(Bar(13, f"server's share {what}", True, None, _part(cpu[_SERVER])))
        bars.append(Bar(13, f"{_IDLE}, over {_SERVED}, {transport}", True, None, woken[_IDLE].over(woken[_SERVED])))
    return Result("idle", turns, rows, bars, machine(place.store.client), _NOTES)


_NOTES = (
    "CPU times are ms per second: 10 ms are 1% of a core. The jobs are BSP with one worker and a model of one number, "
    "so the time to the first commit shows how soon the job has an aggregator.",
)


def _part(cpu: Times) -> Ratio:
    return cpu.over(Times(tuple((1.0,) for _ in cpu.turns)))


def _idle_jobs(store: Store, number: int) -> list[Job]:
    """Create jobs that no worker has joined; they end with the server, which is the benchmark's own."""
    prefix = f"bench-{secrets.token_hex(4)}"
    settings: dict[str, Any] = {"workers": 1, "transport": "redis"}
    return [store.create_job(f"{prefix}-{i}", {"w": np.zeros(1, DTYPE)}, **settings) for i in range(number)]


@contextmanager
def _aggregator(url: str, jobs: Sequence[Job]) -> Iterator[int]:
    """Run `kvps aggregator start` during the block; yield its process id once it has found all `jobs`."""
    command = [sys.executable, "-m", "kvps", "aggregator", "start", "--redis", url]
    environment = os.environ | ONE_THREAD  # NumPy would have a thread for each core
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, env=environment
    ) as process:
        try:
            assert process.stderr
            missing, last = {job.name for job in jobs}, ""
            while missing:
                line = process.stderr.readline()
                if not line:
                    raise KvpsError(f"kvps aggregator start has ended: {last}")
                last = line.strip()
                missing.discard(last.removeprefix("job ").partition(":")[0])
            threading.Thread(target=process.stderr.read, daemon=True).start()  # or a full pipe would block it
            yield process.pid
        finally:
            process.terminate()
