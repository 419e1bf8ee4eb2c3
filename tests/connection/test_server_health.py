"""What a server says of itself, and what is made of it: each thing that can be wrong is said with its remedy."""

from __future__ import annotations

from typing import Any

import pytest

from kvps.connection.server_health import ADVICE, OK, WRONG, Finding, LogSize, of_clock, of_latency, of_logs, of_server

GOOD: dict[str, Any] = {
    "redis_version": "7.2.4",
    "valkey_version": "9.1.2",
    "maxmemory_policy": "noeviction",
    "aof_enabled": 1,
    "used_memory": 10_000_000,
    "maxmemory": 1_000_000_000,
    "connected_clients": 3,
    "maxclients": 10_000,
}
CONFIG = {
    "save": "",
    "client-output-buffer-limit": "normal 0 0 0 slave 268435456 67108864 60 pubsub 33554432 8388608 60",
}


def found(about: str, config: dict[str, str] | None = CONFIG, **changed: Any) -> Finding:
    info = {name: value for name, value in (GOOD | changed).items() if value is not None}
    (one,) = [finding for finding in of_server(info, config) if finding.about == about]
    return one


def test_a_server_that_is_right_has_no_remedy() -> None:
    findings = list(of_server(GOOD, CONFIG))
    assert {finding.verdict for finding in findings} == {OK}
    assert not any(finding.remedy for finding in findings)


@pytest.mark.parametrize(
    ("redis", "valkey", "verdict", "remedy"),
    [
        ("6.0.16", None, WRONG, "upgrade"),
        ("6.2.19", None, ADVICE, "upgrade to 6.2.20"),
        ("7.0.15", None, ADVICE, "upgrade to a newer branch, unless your system mended it"),
        ("7.4.6", None, OK, ""),
        ("8.0.3", None, ADVICE, "upgrade to 8.0.4"),
        ("8.4.0", None, OK, ""),
        ("7.2.4", "8.0.5", ADVICE, "upgrade to 8.0.6"),
        ("7.2.4", "9.0.0", OK, ""),
    ],
)
def test_versions(redis: str, valkey: str | None, verdict: str, remedy: str) -> None:
    one = found("version", redis_version=redis, valkey_version=valkey)
    assert (one.verdict, remedy in one.remedy) == (verdict, True)
    assert ("CVE-2025-49844" in one.found) == (verdict == ADVICE)


@pytest.mark.parametrize(
    ("about", "changed", "verdict", "words"),
    [
        ("eviction", {"maxmemory_policy": "allkeys-lru"}, WRONG, "maxmemory-policy noeviction"),
        ("eviction", {"maxmemory_policy": "volatile-lru", "evicted_keys": 7}, OK, ""),
        ("eviction", {"evicted_keys": 7}, WRONG, "set maxmemory-policy noeviction, give it more memory"),
        ("persistence", {"aof_enabled": 0}, ADVICE, "appendonly yes"),
        ("persistence", {"aof_last_write_status": "err"}, WRONG, "disk"),
        ("persistence", {"rdb_last_bgsave_status": "err"}, WRONG, "disk"),
        ("memory", {"maxmemory": 0, "total_system_memory": 8_000_000_000}, ADVICE, "set maxmemory"),
        ("memory", {"used_memory": 900_000_000}, WRONG, "kvps rm"),
        ("clients", {"connected_clients": 9_000}, WRONG, "raise maxclients"),
    ],
)
def test_what_is_not_right_says_what_to_do(about: str, changed: dict[str, Any], verdict: str, words: str) -> None:
    one = found(about, **changed)
    assert (one.verdict, words in one.remedy) == (verdict, True), one


@pytest.mark.parametrize(
    ("config", "about", "verdict"),
    [
        ({"save": "3600 1"}, "persistence", OK),
        ({"client-output-buffer-limit": "normal 1mb 0 0"}, "reply buffers", WRONG),
        ({"client-output-buffer-limit": "normal 0 8mb 60"}, "reply buffers", WRONG),
        ({"client-output-buffer-limit": "normal 64mb 16mb 60"}, "reply buffers", ADVICE),
        ({"client-output-buffer-limit": "normal 1gb 0 0"}, "reply buffers", OK),
        ({"client-output-buffer-limit": "nonsense"}, "reply buffers", OK),
        ({"maxmemory-clients": "1048576"}, "client memory", WRONG),
        ({"maxmemory-clients": "1%"}, "client memory", WRONG),
        ({"maxmemory-clients": "50%"}, "client memory", ADVICE),
        ({"maxclients": "3"}, "clients", WRONG),
        ({"busy-reply-threshold": "100"}, "scripts", ADVICE),
        ({"lua-time-limit": "5000"}, "scripts", OK),
    ],
)
def test_the_configuration_counts(config: dict[str, str], about: str, verdict: str) -> None:
    assert found(about, config, aof_enabled=0).verdict == verdict


def test_a_configuration_that_may_not_be_read_is_said() -> None:
    assert found("configuration", None).verdict == ADVICE
    assert "cannot be read" in found("persistence", None, aof_enabled=0).found
    assert found("clients", None, connected_clients=9_999).verdict == WRONG, "INFO has maxclients too"


def test_logs() -> None:
    logs = [LogSize("a", 1_000, 427_000, 0.0), LogSize("b", 500_000, 213_500_000, 42_700.0)]
    short, long = of_logs(logs[:1]), of_logs(logs)
    assert (short.verdict, short.found) == (OK, "1,000 entries of 1 job, 427.0 kB, 427 bytes each")
    assert (long.verdict, long.remedy.split()[3]) == (ADVICE, "--log-keep")
    assert long.found == "501,000 entries of 2 jobs, 213.9 MB, 427 bytes each; job b grows by 42.7 kB/s"


def test_times() -> None:
    assert of_latency([0.0001] * 99 + [0.5]).verdict == OK
    slow = of_latency([0.01] * 100)
    assert (slow.verdict, "10.00 ms" in slow.found, "local steps" in slow.remedy) == (ADVICE, True, True)
    assert of_clock(0.2, 0.01).verdict == OK
    assert of_clock(-30, 0.01).verdict == ADVICE
    assert "30.000 s behind" in of_clock(-30, 0.01).found
    assert of_clock(5, 20).verdict == OK, "nobody can know, over such a link"
