"""What is right and wrong with a server for training on it, from what it says of itself. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from kvps.connection.server_info import (
    ANY_KEY,
    EXPIRING_KEY,
    OLDEST_REDIS,
    eviction,
    policy_of,
    reply_limit,
    server_name,
    version_of,
)
from kvps.errors import counted
from kvps.parsing import bytes_text

OK, ADVICE, WRONG = "ok", "advice", "wrong"

_CVE = "CVE-2025-49844"
"""Who may run Lua scripts can run code of their own on the server. It is the newest of the grave ones known when this
version of kvps was made; what fixes it fixes those before it."""
_FIXED = {  # the first release of each branch that has the fix; later branches all have it
    "Redis": {(6, 2): 20, (7, 2): 11, (7, 4): 6, (8, 0): 4, (8, 2): 2},
    "Valkey": {(7, 2): 11, (8, 0): 6, (8, 1): 4},
}
_FULL = 0.8  # part of maxmemory
_FEW_CLIENTS = 0.8  # part of maxclients that is in use
_SLOW_MS = 2.0
_LONG_LOGS = 100_000_000  # bytes
_LARGE_REPLY = 256 << 20  # bytes that wait for one slow reader
_READ_AT_ONCE = 16 << 20  # bytes that kvps may have asked for on one connection: chunks ahead, many entries of a log


class Finding(NamedTuple):
    """What was looked at, one of OK, ADVICE and WRONG, what was found, and for the last two what to do."""

    about: str
    verdict: str
    found: str
    remedy: str = ""


def of_server(info: Mapping[str, Any], config: Mapping[str, str] | None) -> Iterator[Finding]:
    """Yield the findings about one server. `info` is its INFO; `config` its CONFIG, None if this user may not read
    that."""
    yield _version(info)
    yield _policy(info)
    yield _persistence(info, config)
    yield _memory(info)
    yield _clients(info, config)
    if config is None:
        yield Finding(
            "configuration", ADVICE, "this user may not read it", "look as a user who may run CONFIG GET, or ask one"
        )
    else:
        yield _reply_buffers(config)
        if (share := config.get("maxmemory-clients", "0")) != "0":
            yield _client_memory(share, int(info.get("maxmemory", 0)))
        yield _script_time(config)


def _version(info: Mapping[str, Any]) -> Finding:
    name = server_name(info)
    program, _, version = name.partition(" ")
    if version_of(str(info.get("redis_version", ""))) < OLDEST_REDIS:
        return Finding("version", WRONG, name, "kvps needs Redis 6.2 or newer, or Valkey: upgrade")
    branch, fixed = version_of(version), _FIXED.get(program, {})
    numbers = re.match(r"\d+\.\d+\.(\d+)", version)
    patch = int(numbers[1]) if numbers else 0
    if not fixed or branch > max(fixed) or patch >= fixed.get(branch, 1 << 30):
        return Finding("version", OK, name)
    to = (
        f"{branch[0]}.{branch[1]}.{fixed[branch]}"
        if branch in fixed
        else "a newer branch, unless your system mended it"
    )
    return Finding("version", ADVICE, f"{name} has {_CVE}: who may run scripts can run any code", f"upgrade to {to}")


def _policy(info: Mapping[str, Any]) -> Finding:
    policy = policy_of(info)
    if policy.startswith(ANY_KEY):
        why = f"{policy} deletes weights when memory is full"
        return Finding("eviction", WRONG, why, "maxmemory-policy noeviction")
    if why := eviction(info):
        evicted, _, remedy = why.partition(": ")
        return Finding("eviction", WRONG, evicted.removeprefix("the server "), remedy)
    if policy.startswith(EXPIRING_KEY):
        return Finding("eviction", OK, f"{policy} deletes only keys with a time to live, and no weights have one")
    return Finding("eviction", OK, policy)


def _persistence(info: Mapping[str, Any], config: Mapping[str, str] | None) -> Finding:
    saves = bool(config and config.get("save", "").strip())
    keeps = [word for word, on in (("AOF", str(info.get("aof_enabled")) == "1"), ("RDB", saves)) if on]
    for field in ("aof_last_write_status", "rdb_last_bgsave_status"):
        if info.get(field, "ok") != "ok":
            return Finding(
                "persistence", WRONG, f"{field} is {info[field]}", "make room on the server's disk; see its log"
            )
    if keeps:
        return Finding("persistence", OK, " and ".join(keeps))
    return Finding(
        "persistence",
        ADVICE,
        "nothing is kept" if config is not None else "no AOF; whether RDB is on cannot be read",
        "if jobs must outlive the server: appendonly yes, or replicas, or kvps aggregator start --checkpoint-every N",
    )


def _memory(info: Mapping[str, Any]) -> Finding:
    used, limit = int(info.get("used_memory", 0)), int(info.get("maxmemory", 0))
    machine = int(info.get("total_system_memory", 0))
    if not limit:
        return Finding(
            "memory",
            ADVICE,
            f"{bytes_text(used)} used, no limit{f' on a machine of {bytes_text(machine)}' if machine else ''}",
            "set maxmemory to what the machine can give: kvps then refuses a job that does not fit",
        )
    usage = f"{bytes_text(used)} of {bytes_text(limit)} used"
    if used > _FULL * limit:
        return Finding("memory", WRONG, usage, "raise maxmemory, or remove jobs: kvps jobs, kvps rm")
    return Finding("memory", OK, usage)


def _clients(info: Mapping[str, Any], config: Mapping[str, str] | None) -> Finding:
    used, most = int(info.get("connected_clients", 0)), int((config or {}).get("maxclients", info.get("maxclients", 0)))
    usage = f"{counted(used, 'connection')}{f' of {most}' if most else ''}"
    if most and used > _FEW_CLIENTS * most:
        return Finding("clients", WRONG, usage, "raise maxclients, or end clients that nobody needs")
    return Finding("clients", OK, usage)


def _reply_buffers(config: Mapping[str, str]) -> Finding:
    least = reply_limit(config.get("client-output-buffer-limit", ""))
    if not least:
        return Finding("reply buffers", OK, "no limit for workers and readers")
    limit = f"client-output-buffer-limit: the server cuts a client off that has {bytes_text(least)} still to read"
    if least >= _LARGE_REPLY:
        return Finding("reply buffers", OK, limit)
    verdict = WRONG if least < _READ_AT_ONCE else ADVICE
    return Finding("reply buffers", verdict, limit, "client-output-buffer-limit normal 0 0 0")


def _client_memory(share: str, maxmemory: int) -> Finding:
    """The finding about a limit for all clients together, in bytes or as a part of maxmemory."""
    most = maxmemory * int(share.removesuffix("%")) // 100 if share.endswith("%") else int(share)
    if not most:
        return Finding("client memory", OK, f"maxmemory-clients {share} of no maxmemory is no limit")
    limit = f"maxmemory-clients: the server cuts clients off when all together have {bytes_text(most)} in its buffers"
    verdict = WRONG if most < _READ_AT_ONCE else ADVICE
    return Finding("client memory", verdict, limit, "maxmemory-clients 0")


def _script_time(config: Mapping[str, str]) -> Finding:
    ms = int(config.get("busy-reply-threshold") or config.get("lua-time-limit") or 5000)
    if 0 < ms < 1000:
        return Finding(
            "scripts",
            ADVICE,
            f"others get BUSY after {ms} ms of a script",
            "busy-reply-threshold 5000 (lua-time-limit)",
        )
    return Finding("scripts", OK, f"others wait {ms} ms for a script")


class LogSize(NamedTuple):
    """The commit log of one job in Redis: its entries, its bytes, and how many bytes it grows by in a second."""

    job: str
    entries: int
    nbytes: int
    bytes_per_s: float


def of_logs(logs: Sequence[LogSize]) -> Finding:
    """Return the finding about the commit logs of all jobs, of which there is one at least."""
    entries, total = sum(log.entries for log in logs), sum(log.nbytes for log in logs)
    fastest = max(logs, key=lambda log: log.bytes_per_s)
    sizes = f"{entries:,} entries of {counted(len(logs), 'job')}, {bytes_text(total)}, "
    sizes += f"{total / max(1, entries):.0f} bytes each"
    if fastest.bytes_per_s:
        sizes += f"; job {fastest.job} grows by {bytes_text(fastest.bytes_per_s)}/s"
    if total <= _LONG_LOGS:
        return Finding("commit logs", OK, sizes)
    return Finding(
        "commit logs", ADVICE, sizes, "kvps aggregator start --log-keep N --checkpoints DIR moves old entries"
    )


def of_latency(seconds: Sequence[float]) -> Finding:
    """Return the finding about the times of short requests."""
    ms = sorted(1000 * s for s in seconds)
    middle, late = median(ms), ms[min(len(ms) - 1, int(0.99 * len(ms)))]
    times = f"{middle:.2f} ms for a short request, {late:.2f} ms for 1 in 100"
    if middle <= _SLOW_MS:
        return Finding("latency", OK, times)
    return Finding("latency", ADVICE, times, "a round takes several: put workers nearer, or take local steps")


def of_clock(offset_s: float, error_s: float) -> Finding:
    """Return the finding about the server's clock minus this machine's."""
    where = "ahead of" if offset_s > 0 else "behind"
    offset = f"the server's is {abs(offset_s):.3f} s {where} this machine's (+-{error_s:.3f} s)"
    if abs(offset_s) <= 1 + error_s:
        return Finding("clock", OK, offset)
    return Finding("clock", ADVICE, offset, "training does not mind, but times in logs differ: have both follow NTP")
