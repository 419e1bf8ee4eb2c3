"""`kvps stop`, `suspend`, `pause`, `resume` and `set`: what they say, and what status, jobs and log say after them."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest

import kvps
from kvps.store import Store


@pytest.fixture
def said(store: Store, printed: Callable[..., str]) -> Callable[..., str]:
    """A function that runs a command on the server, and returns what it says."""
    return lambda *words: printed(*words, KVPS_REDIS_URL=store.url).strip()


def test_a_run_is_steered_from_the_command_line(store: Store, said: Callable[..., str]) -> None:
    job = store.create_job("job", {"x": np.zeros(3, np.float32)}, optimizer=kvps.SGD(lr=0.5))
    assert said("pause", "job", "--reason", "look at it") == "job job: paused: look at it"
    assert said("pause", "job") == "job job: paused: look at it"
    assert said("status", "job").startswith("job  paused: look at it  ")
    assert said("jobs").endswith("  paused: look at it")
    assert said("resume", "job") == "job job: goes on; it was paused: look at it"
    assert said("resume", "job") == "job job: goes on, as before"
    assert said("set", "job", "lr=0.25") == "job job: learning rate 0.25 from the next version on"
    assert said("set", "job", "lr=own") == "job job: learning rate 0.5 from the next version on, its own"
    with job.join("w0") as session:
        session.pull()
        session.push({"x": np.ones(3, np.float32)})
        assert said("suspend", "job") == "job job: suspended; all workers end with round 1"
        assert said("stop", "job", "--reason", "enough") == "job job: stopped: enough; all workers end with round 1"
        session.pull()
    assert json.loads(said("status", "job", "--json"))["run"]["reason"] == "enough"
    log = said("log", "job", "-n", "0")
    assert "learning rate 0.25" in log
    assert "all workers end with round 1, enough" in log


def test_a_job_whose_workers_have_finished_is_not_said_to_go_on(store: Store, said: Callable[..., str]) -> None:
    job = store.create_job("job", {"x": np.zeros(3, np.float32)})
    with job.join("w0") as session:
        job.stop("enough")
        session.pull()
    over = "; but all its workers have finished"
    assert said("resume", "job") == f"job job: goes on; it was stopped by w0: enough{over}"
    assert said("pause", "job") == f"job job: paused{over}"
    assert said("set", "job", "lr=0.25") == f"job job: learning rate 0.25 from the next version on{over}"


def test_what_cannot_be_set_is_refused_in_one_line(store: Store, said: Callable[..., str]) -> None:
    store.create_job("job", {"x": np.zeros(3, np.float32)})
    for setting, words in (
        ("momentum=1", "cannot be set while a job runs: lr=RATE can"),
        ("lr=fast", "lr must be a number, or own"),
        ("lr=nan", "lr must be a finite number from 0"),
    ):
        with pytest.raises(kvps.InvalidSetting, match=words):
            said("set", "job", setting)
    with pytest.raises(kvps.JobNotFound, match="no job 'none'"):
        said("stop", "none")
