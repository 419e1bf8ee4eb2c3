"""`kvps worker`, and with it the parts that are started one by one."""

from __future__ import annotations

import importlib.util
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.commands import LONG, TINY, kvps_run, private_store, refused
from helpers.waiting import eventually
from kvps_workers import load_task

pytestmark = pytest.mark.slow  # each starts whole commands


def test_the_parts_by_hand_in_the_unlikeliest_order(home: Path, start: Any) -> None:
    """A worker first, which starts the server and waits; then another, the job, and at last an aggregator."""
    first = start("worker")
    first.until("waiting for a job")
    second = start("worker")
    second.until("waiting for a job")
    created = kvps_run("create", "digits", "--job", "mine", "--workers", "2", *TINY)
    assert created.returncode == 0
    assert "waits for 2 workers: kvps worker --job mine; and for kvps aggregator start, if none runs" in created.stderr
    assert eventually(lambda: len(private_store().job("mine").state().members) == 2)
    status = kvps_run("status", "mine")
    assert "waits for an aggregator" in status.stdout
    aggregator = start("aggregator", "start", "--job", "mine")
    aggregator.until("finished")
    assert [aggregator.wait(), first.wait(), second.wait()] == [0, 0, 0]


def test_a_worker_that_is_ended_leaves_and_another_goes_on(home: Path, start: Any) -> None:
    aggregator = start("aggregator", "start")
    aggregator.until("serving")
    assert kvps_run("create", "digits", "--job", "long", "--workers", "2", *LONG).returncode == 0
    workers = [start("worker", "--id", f"w{i}") for i in range(2)]
    job = private_store().job("long")
    assert eventually(lambda: job.state().version > 20)
    assert workers[1].end(signal.SIGINT) == 128 + signal.SIGINT
    left = job.state().members["w1"]
    assert left.state in ("gone", "draining")
    assert not left.finished
    before = job.state().version
    assert eventually(lambda: job.state().version > before + 20), "the others go on at once"
    again = start("worker")
    again.until("job long")
    assert eventually(lambda: job.state().members["w1"].state == "active")
    member = job.state().members["w1"]
    assert (member.rank, member.incarnation[0]) == (left.rank, "2")
    assert eventually(lambda: job.state().clock["w1"] > left.clock + 20)


def test_create_waits_for_a_server_and_an_aggregator_serves_every_job(home: Path, start: Any) -> None:
    create = start("create", "digits", "--job", "early", "--workers", "1", *TINY)
    create.until("no private server runs yet")
    server = start("aggregator", "start")
    create.until("job early")
    assert create.wait() == 0
    assert kvps_run("worker").returncode == 0
    assert kvps_run("create", "digits", "--job", "late", "--workers", "1", "--seed", "5", *TINY).returncode == 0
    seeded = private_store().job("late").snapshot()[1]["W1"]
    assert np.array_equal(seeded, load_task("digits").parameters(5)["W1"])
    assert kvps_run("worker", "--job", "late").returncode == 0
    assert eventually(lambda: kvps_run("jobs").stdout.count("finished") == 2)
    assert server.end() == 128 + signal.SIGTERM


@pytest.mark.skipif(importlib.util.find_spec("cupy") is not None, reason="CuPy is installed here")
def test_a_gpu_without_cupy_is_refused_in_one_line(home: Path) -> None:
    assert "pip install '.[cuda12]' in a clone of kvps (or cuda13)" in refused("worker", "--gpu", "0")
