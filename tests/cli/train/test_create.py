"""`kvps create`, before there is a server."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.commands import TINY, kvps_run
from helpers.waiting import eventually
from kvps_workers import load_task

import kvps

pytestmark = pytest.mark.slow  # each starts whole commands


def test_create_waits_for_a_server_and_an_aggregator_serves_every_job(home: Path, start: Any) -> None:
    create = start("create", "digits", "--job", "early", "--workers", "1", *TINY)
    create.until("no private server runs yet")
    server = start("aggregator", "start")
    create.until("job early")
    assert create.wait() == 0
    assert kvps_run("worker").returncode == 0
    assert kvps_run("create", "digits", "--job", "late", "--workers", "1", "--seed", "5", *TINY).returncode == 0
    with kvps.connect() as store:
        weights = store.job("late").snapshot()[1]["W1"]
    of_seeds = [load_task("digits").parameters(seed)["W1"] for seed in (5, 0)]
    assert [np.array_equal(weights, array) for array in of_seeds] == [True, False]
    assert kvps_run("worker", "--job", "late").returncode == 0
    listed = kvps_run("jobs").stdout
    assert eventually(lambda: kvps_run("jobs").stdout.count("finished") == 2), listed
    assert server.end() == 128 + signal.SIGTERM
