"""Reads from a server's INFO which server it is, and whether kvps can train on it. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from kvps.errors import ServerUnfit

OLDEST_REDIS = (6, 2)


def server_name(info: Mapping[str, Any]) -> str:
    """Return name and version, as in "Valkey 9.1.2" or "Redis 7.0.15"."""
    if "valkey_version" in info:
        return f"Valkey {info['valkey_version']}"
    return f"Redis {info.get('redis_version', 'unknown')}"


def check_fit(where: str, info: Mapping[str, Any]) -> None:
    """Raise ServerUnfit, saying what to do, for a server that is too old, or that evicts keys.

    Valkey's `redis_version` names the Redis whose commands it has: 7.2 or later, so every Valkey is new enough.
    """
    if version_of(str(info.get("redis_version", "unknown"))) < OLDEST_REDIS:
        raise ServerUnfit(f"{where} is {server_name(info)}: kvps needs Redis 6.2 or newer, or Valkey")
    policy = info.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        raise ServerUnfit(
            f"{where} evicts keys when memory is full (maxmemory-policy {policy}), which would delete weights: "
            f"set it to noeviction, as with CONFIG SET maxmemory-policy noeviction"
        )


def version_of(text: str) -> tuple[int, int]:
    """Return (7, 4) for "7.4-rc1"; (0, 0) for text that is no version."""
    numbers = re.match(r"(\d+)\.(\d+)", text)
    return (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)
