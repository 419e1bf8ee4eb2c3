"""`kvps create`, before there is a server."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from helpers.commands import TINY, kvps_run
from helpers.waiting import eventually

pytestmark = pytest.mark.slow  # each starts whole commands


def test_create_waits_for_a_server_and_an_aggregator_serves_every_job(home: Path, start: Any) -> None:
    create = start("create", "digits", "--job", "early", "--workers", "1", *TINY)
    create.until("no private server runs yet")
    server = start("aggregator", "start")
    create.until("job early")
    assert create.wait() == 0
    assert kvps_run("worker").returncode == 0
    assert kvps_run("create", "digits", "--job", "late", "--workers", "1", *TINY).returncode == 0
    assert kvps_run("worker", "--job", "late").returncode == 0
    listed = kvps_run("jobs").stdout
    assert eventually(lambda: kvps_run("jobs").stdout.count("finished") == 2), listed
    assert server.end() == 128 + signal.SIGTERM
