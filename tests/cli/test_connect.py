"""How commands find a server, and what they say when there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.commands import TINY, kvps_run, refused
from helpers.servers import free_port
from helpers.waiting import command_lines_with, processes_of

import kvps

pytestmark = pytest.mark.slow  # each starts whole commands


def test_other_errors_are_one_line_and_exit_1(home: Path) -> None:
    for command in ("jobs", "status x", "rm x", "cli", "server stop", "server status", "metrics", "doctor"):
        assert "no private server runs" in refused(*command.split(), code=1)
    assert "hush" not in refused("jobs", "--redis", "redis://:hush@127.0.0.1:1", code=1)


def test_workers_join_from_elsewhere_over_tcp(home: Path, start: Any) -> None:
    """--listen opens a port behind a password, and prints the line to type elsewhere."""
    port = free_port()
    aggregator = start("aggregator", "start", "--listen", f"127.0.0.1:{port}")
    line = aggregator.until("join from elsewhere").splitlines()[-1].partition(": ")[2]
    url = line.split()[0].removeprefix("KVPS_REDIS_URL=")
    password = url.split("@")[0].rpartition(":")[2]
    assert len(password) > 20
    assert line.endswith("kvps worker")
    with pytest.raises(kvps.NoServer, match="login"):
        kvps.connect(f"redis://127.0.0.1:{port}")
    assert kvps_run("create", "digits", "--job", "far", "--workers", "1", *TINY).returncode == 0
    assert kvps_run("worker", KVPS_REDIS_URL=url).returncode == 0
    assert kvps_run("cli", "hget", "kvps:{far}:clock", "w0").stdout == "60\n"
    assert kvps_run("cli", "--redis", url, "hget", "kvps:{far}:clock", "w0").stdout == "60\n"
    assert not command_lines_with(password)


def test_commands_begun_together_share_one_server(home: Path, start: Any) -> None:
    workers = [start("worker") for _ in range(4)]
    for worker in workers:
        worker.until("waiting for a job")
    assert sum("unixsocket:" in line for line in processes_of(home)) == 1


def test_a_runtime_directory_open_to_others_is_refused(home: Path) -> None:
    home.chmod(0o755)
    assert "0700" in refused("worker", code=1)
    home.chmod(0o700)
