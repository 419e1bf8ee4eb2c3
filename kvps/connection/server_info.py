"""Reads from a server's INFO and CONFIG which server it is, and whether kvps can train on it. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from kvps.errors import ServerUnfit, counted

OLDEST_REDIS = (6, 2)
_VALKEY_IS = "7.2.4"  # the Redis whose commands a Valkey says that it has
ANY_KEY = "allkeys-"
"""How each policy begins by which a server deletes any key when its memory is full."""
EXPIRING_KEY = "volatile-"
"""How each policy begins by which it deletes keys that have a time to live. Of a job only leases and pins have one, and
neither is missed."""
_UNITS = {"": 1, "k": 1000, "kb": 1 << 10, "m": 1000**2, "mb": 1 << 20, "g": 1000**3, "gb": 1 << 30}


def server_name(info: Mapping[str, Any]) -> str:
    """Return name and version, as in "Valkey 9.1.2" or "Redis 7.0.15"."""
    if "valkey_version" in info:
        return f"Valkey {info['valkey_version']}"
    return f"Redis {info.get('redis_version', 'unknown')}"


def greeting_as_info(reply: Sequence[Any]) -> dict[str, Any]:
    """Return what the reply to HELLO 2 says of a server, under the names of INFO."""
    greeting = dict(zip(reply[::2], reply[1::2], strict=False))
    version, mode = str(greeting.get("version", "")), {"cluster_enabled": int(greeting.get("mode") == "cluster")}
    if greeting.get("server") == "valkey":
        return mode | {"redis_version": _VALKEY_IS, "valkey_version": version}
    return mode | {"redis_version": version}


def check_fit(where: str, info: Mapping[str, Any]) -> None:
    """Raise ServerUnfit, saying what to do, for a server that is too old, or that evicts keys.

    Valkey's `redis_version` names the Redis whose commands it has: 7.2 or later, so every Valkey is new enough.
    """
    if version_of(str(info.get("redis_version", "unknown"))) < OLDEST_REDIS:
        raise ServerUnfit(f"{where} is {server_name(info)}: kvps needs Redis 6.2 or newer, or Valkey")
    policy = policy_of(info)
    if policy.startswith(ANY_KEY):
        raise ServerUnfit(
            f"{where} evicts keys when memory is full (maxmemory-policy {policy}), which would delete weights: "
            f"set it to noeviction, as with CONFIG SET maxmemory-policy noeviction"
        )


def policy_of(info: Mapping[str, Any]) -> str:
    """Return what the server does when its memory is full, as "noeviction"."""
    return str(info.get("maxmemory_policy", "noeviction"))


def evicted_keys(info: Mapping[str, Any]) -> int:
    """Return how many keys the server has deleted for want of memory since it was started; 0 if its policy spares what
    has no time to live."""
    return 0 if policy_of(info).startswith(EXPIRING_KEY) else int(info.get("evicted_keys", 0))


def eviction(info: Mapping[str, Any]) -> str:
    """Return that the server has evicted keys, and what to do about it; "" if it has not."""
    count = evicted_keys(info)
    if not count:
        return ""
    return (
        f"the server has evicted {counted(count, 'key')} since it was started (maxmemory-policy {policy_of(info)}), "
        f"and weights may be among them: set maxmemory-policy noeviction, give it more memory, and go on from a "
        f"checkpoint (kvps checkpoint restore)"
    )


def version_of(text: str) -> tuple[int, int]:
    """Return (7, 4) for "7.4-rc1"; (0, 0) for text that is no version."""
    numbers = re.match(r"(\d+)\.(\d+)", text)
    return (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)


def reply_limit(setting: str) -> int:
    """Return with how many bytes still to read a client is cut off, as `client-output-buffer-limit` says; 0: never."""
    words = setting.split()
    limits = {words[i]: words[i + 1 : i + 3] for i in range(0, len(words) - 3, 4)}
    return min((n for n in map(_nbytes, limits.get("normal", [])) if n), default=0)


def _nbytes(text: str) -> int:
    """Return the bytes that a size of redis.conf says, as 256mb; 0 for text that is none."""
    size = re.fullmatch(r"(\d+)([a-z]*)", text.lower())
    return int(size[1]) * _UNITS.get(size[2], 0) if size else 0
