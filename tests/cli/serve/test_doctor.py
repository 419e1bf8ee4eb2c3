"""`kvps doctor` on real servers: nothing is changed, and what is wrong has its remedy and exit code 1."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.commands import kvps_run
from helpers.control_groups import control_group
from helpers.harness import aggregating, await_version, model, work_on
from helpers.servers import running_server

import kvps
from kvps.store import Store


def doctor(url: str, *arguments: str) -> tuple[int, list[dict[str, Any]]]:
    done = kvps_run("doctor", "--json", *arguments, KVPS_REDIS_URL=url)
    assert done.stderr == ""
    return done.returncode, json.loads(done.stdout)


def keys(store: Store) -> set[str]:
    """All keys but the one with which each connection tests for a second that it may write."""
    return set(store.client.scan("*")) - {"kvps:preflight"}


def about(findings: list[dict[str, Any]], what: str) -> dict[str, Any]:
    (one,) = [finding for finding in findings if finding["about"].startswith(what)]
    return one


def test_a_fit_server_is_fit_and_nothing_is_changed(store: Store) -> None:
    job = store.create_job("j", model())
    with aggregating(job):
        work_on(job, "w0", 3)
        await_version(job, 3)
    before = keys(store)
    code, findings = doctor(store.url)
    assert (code, keys(store)) == (0, before)
    assert "wrong" not in {finding["verdict"] for finding in findings}
    assert about(findings, "version")["found"].startswith(store.server_name)
    assert about(findings, "latency")["verdict"] == "ok"
    assert about(findings, "clock")["verdict"] == "ok"
    assert re.fullmatch(
        r"6 entries of 1 job, [\d.]+ kB, \d+ bytes each(; job j grows by .* kB/s)?", about(findings, "commit")["found"]
    )
    assert about(findings, "user")["verdict"] in ("ok", "advice")
    wanted = ("eviction", "persistence", "memory", "clients", "reply", "scripts", "replicas", "shared", "GPU")
    assert all(about(findings, what) for what in wanted)
    for finding in findings:
        assert (finding["verdict"] == "ok") == (finding["remedy"] == ""), finding


@pytest.mark.slow
def test_a_model_that_does_not_fit_is_said_as_create_job_would(store: Store) -> None:
    used, limit = store.client.memory()
    store.client.call("CONFIG", "SET", "maxmemory", used + 50_000_000)
    try:
        code, findings = doctor(store.url, "--model", "1", "--workers", "2")
        assert about(findings, "room for 1 MB")["verdict"] == "ok"
        code, findings = doctor(store.url, "--model", "40", "--workers", "2")
        assert (code, about(findings, "room for 40 MB")["verdict"]) == (1, "wrong")
        big = {"model": np.zeros(10_000_000, np.float32)}
        with pytest.raises(kvps.ServerFull):
            store.create_job("j", big, workers=2, optimizer=kvps.Adam(), transport="redis")
    finally:
        store.client.call("CONFIG", "SET", "maxmemory", limit)


@pytest.mark.slow
def test_a_user_with_few_rights_is_told_what_cannot_be_seen(store: Store) -> None:
    store.create_job("j", model())
    store.client.call("ACL", "SETUSER", "few", "on", ">secret", "~*", "&*", "+@all", "-config", "-acl|whoami")
    try:
        code, findings = doctor(_as_user(store.url, "few", "secret"))
        assert code == 0
        assert "may not read" in about(findings, "configuration")["found"]
        assert about(findings, "user")["found"] == "one with few rights, as kvps acl makes them"
    finally:
        store.client.call("ACL", "DELUSER", "few")


def _as_user(url: str, user: str, password: str) -> str:
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{user}:{password}@{rest.rpartition('@')[2]}"


@pytest.mark.slow
def test_a_server_that_every_other_command_refuses_is_looked_at(store: Store) -> None:
    store.client.call("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    try:
        code, findings = doctor(store.url)
        assert code == 1
        assert "allkeys-lru" in about(findings, "server")["found"]
        assert about(findings, "eviction")["remedy"] == "maxmemory-policy noeviction"
        wanted = ("version", "persistence", "memory", "clients", "latency", "clock", "shared", "GPU")
        assert all(about(findings, what) for what in wanted)
    finally:
        store.client.call("CONFIG", "SET", "maxmemory-policy", "noeviction")


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--appendonly", "yes"]])
def test_room_is_that_of_the_container(options: list[str]) -> None:
    """Here of 400 MB. A server that keeps a file needs all of its memory again while a fork writes that file anew."""
    with control_group(400_000_000) as enters, running_server(*options) as url:
        command = [*enters, sys.executable, "-m", "kvps", "doctor", "--json", "--model", "20", "--redis", url]
        done = subprocess.run(command, capture_output=True, text=True)
    findings = json.loads(done.stdout)
    room = about(findings, "room for 20 MB")
    assert (done.returncode, room["verdict"]) == (1, "wrong")
    assert room["found"].endswith(" of 400.0 MB free in this container"), room
    assert ("while a fork of the server writes" in room["found"]) == bool(options)
    overcommits = Path("/proc/sys/vm/overcommit_memory").read_text() == "1\n"
    warned = any(finding["about"] == "overcommit" for finding in findings)
    assert warned == (bool(options) and not overcommits)
