"""What a job costs its server and its processes: counters, read before and after."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from pathlib import Path

from kvps.connection.client import Client
from kvps.job import Job

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

    @property
    def processor_s(self) -> float:
        """The CPU time of all processes together."""
        return self.server_s + self.aggregator_s + self.workers_s

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
