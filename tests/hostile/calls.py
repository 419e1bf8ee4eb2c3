"""How long the server works on one call of a script, by its own slow log: meanwhile it serves nobody else."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import redis
from helpers.servers import running_server
from kvps_workers.queue.queue import SCRIPTS as QUEUE_SCRIPTS

import kvps
from kvps.parsing import MOST_SHARDS
from kvps.protocol.scripts import SCRIPTS

MOST_WORKERS = 4_096
LONG_MS = 100  # of one call of a script
LONGEST_MS = 1_000  # the same on a machine that is busy with others, where it takes ten times as long
_SLOW_US = 2_000  # what is noted at all
_KEPT = 4_096
_NAMES = {script.sha.encode(): name for name, script in [*SCRIPTS.items(), *QUEUE_SCRIPTS.items()]}
_ME = {"host": "here", "pid": 1, "start": "", "space": "", "device": "cpu"}


class Call(NamedTuple):
    """A call of a script: how long it took the server, in ms, and the name of the script."""

    ms: float = 0.0
    script: str = "none"

    def __str__(self) -> str:
        return f"{self.ms:.1f} ms ({self.script})"


class SlowCalls:
    """The calls of scripts that were slow since the last look."""

    def __init__(self, raw: Any) -> None:
        self._raw = raw
        raw.config_set("slowlog-log-slower-than", _SLOW_US)
        raw.config_set("slowlog-max-len", _KEPT)
        raw.slowlog_reset()

    def longest(self) -> Call:
        """Return the longest one."""
        return max(self.all(), default=Call())

    def all(self) -> list[Call]:
        """Return them."""
        entries = self._raw.slowlog_get(_KEPT)
        if entries:
            self._raw.slowlog_reset()
        return [
            Call(entry["duration"] / 1000, _NAMES.get(words[1], "of a test"))
            for entry in entries
            if len(words := entry["command"].split(b" ", 2)) > 1 and words[0].upper() == b"EVALSHA"
        ]


def honest() -> dict[str, Call]:
    """Return the longest call in a job of as many workers, and in one of as many shards, as a job may have: it is made,
    commits a version, has a restarted server and silent workers, and is removed."""
    found: dict[str, Call] = {}
    with running_server() as url, kvps.connect(url) as store, redis.Redis.from_url(url, protocol=2) as raw:
        slow = SlowCalls(raw)
        for name, workers, shards in (("workers", MOST_WORKERS, 1), ("shards", 4, MOST_SHARDS)):
            params = {"x": np.zeros(shards, np.float32)}
            job = store.create_job(name, params, workers=workers, shards=shards, worker_timeout_ms=60_000)
            scripts, history = job.access.scripts, job.state().history
            for number in range(workers):
                scripts.join(f"w{number}", "n", "", _ME)
            for number in range(workers):
                scripts.push(f"w{number}", "1-n", 1, 0, 1, ",".join(["0" * 16] * shards), history)
            for shard in range(shards):
                term, plan = scripts.acquire(shard, "holder", 600_000, "n").term, scripts.plan().plan
                assert plan, "all have pushed"
                flipped = scripts.ready(shard, term, plan, "0" * 16).flipped
            assert flipped, "all shards are staged"
            scripts.recover("another", f"{history}-2", 1)
            raw.hset(job.access.keys.version, "run_id", job.access.server.run_id())  # as if the server were that one
            scripts.evict()  # the first look evicts nobody
            raw.zadd(job.access.keys.heartbeat, {f"w{number}": 1 for number in range(workers)})
            assert len(scripts.evict().workers) == workers
            scripts.remove([f"w{number}" for number in range(workers)])
            found[name] = slow.longest()
    return found
