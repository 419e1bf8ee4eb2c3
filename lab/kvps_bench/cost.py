"""What a job costs its server and its processes: counters, read before and after, and the times of script calls."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import redis

from kvps.connection.client import Client
from kvps.job import Job
from kvps.protocol.scripts import SCRIPTS

_SHORTEST_US = 10  # shorter commands are not logged: a script takes longer, most commands that it calls do not
_MOST_ENTRIES = 200_000
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Cost:
    """Counters of a job, its server and its processes. The difference of two readings is the cost in between.

    at_s                          this machine's monotonic clock; the server's uptime is not fine enough
    contributions, versions       committed
    received_bytes, sent_bytes    by the server, over all its connections
    script_s, script_calls        the server's time in scripts, with all commands that they call
    server_s, aggregator_s, workers_s   CPU time
    """

    at_s: float
    contributions: float
    versions: float
    received_bytes: float
    sent_bytes: float
    script_s: float
    script_calls: float
    server_s: float
    aggregator_s: float
    workers_s: float

    @classmethod
    def so_far(cls, job: Job, at_s: float, aggregators: Iterable[int], workers: Iterable[int]) -> Cost:
        """Return the counters now, those of a cluster's masters together; `aggregators` and `workers` are ids of
        processes of this machine (Linux)."""
        keys = job.access.keys
        clock, version = job.access.client.together([("HVALS", keys.clock), ("HGET", keys.version, "version")])
        of_servers = map(sum, zip(*job.access.client.on_masters(_server), strict=True))
        of_processes = (sum(map(_cpu_seconds, ids)) for ids in (aggregators, workers))
        return cls(at_s, sum(map(int, clock)), int(version), *of_servers, *of_processes)

    def __sub__(self, before: Cost) -> Cost:
        pairs = zip(astuple(self), astuple(before), strict=True)
        return Cost(*(now - then for now, then in pairs))


def _server(client: Client) -> tuple[float, ...]:
    """Return the counters of one server: from `received_bytes` to `server_s`."""
    stats, cpu, commands = client.gather([("INFO", "stats"), ("INFO", "cpu"), ("INFO", "commandstats")])
    scripts = [commands[name] for name in ("cmdstat_eval", "cmdstat_evalsha") if name in commands]
    return (
        int(stats["total_net_input_bytes"]),
        int(stats["total_net_output_bytes"]),
        sum(int(script["usec"]) for script in scripts) / 1e6,
        sum(int(script["calls"]) for script in scripts),
        float(cpu["used_cpu_user"]) + float(cpu["used_cpu_sys"]),
    )


def _cpu_seconds(pid: int) -> float:
    """Return the user and system time of a process, all its threads together, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


class ScriptCall(NamedTuple):
    """One call of a script, timed by the server."""

    script: str
    seconds: float


class ScriptTimes:
    """The time of every single script call, from the server's SLOWLOG. The server must be this benchmark's own."""

    def __init__(self, url: str) -> None:
        # Not kvps's own client: entries quote arguments, and the gradients among them are not text.
        self._redis: Any = redis.Redis.from_url(url, protocol=2)
        self._names = {script.sha.encode(): name for name, script in SCRIPTS.items()}
        self._calls: list[ScriptCall] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record calls while the block runs. Every command of more than 10 us then takes about 1 us longer."""
        self._redis.slowlog_reset()
        self._redis.config_set("slowlog-max-len", _MOST_ENTRIES)
        self._redis.config_set("slowlog-log-slower-than", _SHORTEST_US)
        try:
            yield
        finally:
            self._redis.config_set("slowlog-log-slower-than", -1)

    def fetch(self) -> None:
        """Fetch the calls recorded since the last fetch. Call it now and then: the server keeps them in memory."""
        pipe = self._redis.pipeline(transaction=True)  # or calls recorded in between would be lost
        pipe.execute_command("SLOWLOG GET", _MOST_ENTRIES)
        pipe.slowlog_reset()
        entries, _ = pipe.execute()
        for entry in reversed(entries):  # newest first
            words: list[bytes] = entry["command"].split(b" ", 2)
            if words[0] == b"EVALSHA":
                self._calls.append(ScriptCall(self._names.get(words[1], "another"), entry["duration"] / 1e6))

    def take(self) -> list[ScriptCall]:
        """Return all calls recorded since the last `take`, oldest first."""
        self.fetch()
        taken, self._calls = self._calls, []
        return taken

    def close(self) -> None:
        self._redis.close()


def by_kind(calls: Sequence[ScriptCall]) -> Mapping[str, Sequence[float]]:
    """Return the seconds of each script's calls; calls of `plan` that a commit follows are apart from the rest.

    The job must have one shard and one aggregator: there every `ready` commits, and the last `plan` before it is the
    one that opened the plan.
    """
    seconds: dict[str, list[float]] = {}
    waiting: ScriptCall | None = None
    for call in calls:
        if call.script in ("plan", "ready") and waiting:
            kind = "plan, opens one" if call.script == "ready" else "plan, opens none"
            seconds.setdefault(kind, []).append(waiting.seconds)
            waiting = None
        if call.script == "plan":
            waiting = call
        else:
            name = "ready, commits" if call.script == "ready" else call.script
            seconds.setdefault(name, []).append(call.seconds)
    return seconds
