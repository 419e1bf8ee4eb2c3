"""The jobs of one run of a script: which is which, in all copies alike, and the way through those that are finished."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
from helpers.arrays import assert_same_bits
from helpers.harness import aggregating, gradient, log_entries, model
from kvps_cli.train.jobs_of_run import check_run_name

import kvps
import kvps.launch
from kvps.job import is_left
from kvps.machine import launcher
from kvps.run_jobs import NextJobs, Run, names_of
from kvps.store import Store

RUN = Run("run", "0000000a")


@pytest.fixture
def rank_0(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is the only copy of a script under `kvps run`."""
    variables = kvps.launch.of_copy(0, 1, *RUN, {}) | {launcher.VARIABLE: launcher.this_process("kvps run", 1, "run")}
    for name, value in variables.items() | {("KVPS_REDIS_URL", store.url)}:
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(kvps.launch, "_made_here", NextJobs())


def train(job: kvps.Job, rounds: int = 3) -> None:
    with aggregating(job), job.join("w0") as session:
        while session.clock < rounds:
            session.state["done"] = session.clock + 1
            session.push(gradient(session.pull(), session.rank, session.clock))


@pytest.mark.usefixtures("rank_0")
def test_each_job_begins_when_the_one_before_is_closed_and_two_at_once_have_names(store: Store) -> None:
    with kvps.from_env() as worker:
        for which in ("", "2"):
            job = worker.create_job(model())
            assert (job.name, job.id) == (RUN.job_name(which), RUN.job_id(RUN.job_name(which)))
            with pytest.raises(kvps.WrongOrder, match=f"trains job '{job.name}' already: close .* name=\"critic\""):
                worker.create_job(model())
            critic = worker.create_job(model(1), name="critic")
            assert critic.name == RUN.job_name(f"critic.{which}".rstrip("."))
            train(job)
            train(critic)
    with kvps.from_env() as worker:
        assert worker.create_job(model()).name == "run.3"
    with kvps.from_env() as worker:
        assert worker.create_job(model()).name == "run.4", "the end of the block closes it too"
        for name, why in (("7", "the later jobs of a run have numbers"), ("a b", "not allowed"), ("c" * 61, "1 to 64")):
            with pytest.raises(kvps.InvalidName, match=why):
                worker.create_job(model(), name=name)
    names = ["run", "run.2", "run.3", "run.4", "run.critic", "run.critic.2"]
    assert [job.name for job in RUN.jobs(store)] == names
    assert {Run.of(job) for job in RUN.jobs(store)} == {RUN}
    assert names_of("run", ["run.10", "runs", "run.9", "run"]) == ["run", "run.9", "run.10"]


@pytest.mark.usefixtures("rank_0")
def test_a_worker_that_comes_back_passes_through_a_job_that_is_finished(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    with kvps.from_env() as worker:
        job = worker.create_job(model())
        train(job)
        again = job.join("w0")  # this process may go on with it
        assert again.incarnation.startswith("2-")
        with pytest.raises(kvps.WorkerAlive, match="'w0' of job 'run' has joined in this very process: close its sess"):
            store.job("run").join("w0")
        again.leave()
        assert not caplog.records
        entry = json.loads(store.client.call("HGET", job.access.keys.workers, "w0"))
        store.client.call("HSET", job.access.keys.workers, "w0", json.dumps(entry | {"pid": 2**22 + 1}))
        log = list(log_entries(job))

        back = store.job("run")
        with back.join() as session:
            assert "worker w0: job run is finished: no step of it is done again" in caplog.text
            assert (session.clock, session.round, session.rank, session.state) == (3, 3, 0, {"done": 3})
            assert (session.version, session.sequence, session.next_unit()) == (3, 0, None)
            assert_same_bits(session.pull(), job.snapshot()[1])
            session.push({name: np.ones_like(array) for name, array in session.pull().items()})
            raise AssertionError("the push ends the block")
        assert is_left(back)
        assert list(log_entries(job)) == log, "it has not joined"


def test_a_name_to_which_no_number_can_be_added_is_refused_at_the_first_job() -> None:
    assert check_run_name("n" * 60)
    with pytest.raises(kvps.InvalidName, match=r"too long for a run, .* at most 60 characters, --job NAME"):
        check_run_name("n" * 61)
