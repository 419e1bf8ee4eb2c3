"""The workers of a job that `kvps up` or `kvps run` launched are processes of that command, and nobody else's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.commands import ENDLESS, LONG_UP, TINY, kvps_run
from helpers.harness import model
from helpers.waiting import awaited_job, eventually

import kvps
from kvps.config import JobConfig, Metadata
from kvps.machine import launcher, process

pytestmark = pytest.mark.slow  # each starts whole commands


def test_a_worker_that_waits_for_a_job_leaves_the_workers_of_up_alone(lasting: kvps.Store, start: Any) -> None:
    waiting = start("worker")
    waiting.until("waiting for a job")
    done = kvps_run("up", "digits", *TINY)
    assert done.returncode == 0, done.stdout + done.stderr
    assert kvps_run("create", "digits", "--job", "mine", "--workers", "1", *TINY).returncode == 0
    assert "job mine" in waiting.until("job ")
    assert eventually(lambda: "w0" in lasting.job("mine").state().members)


def test_who_names_the_job_is_told_whose_its_workers_are(lasting: kvps.Store, start: Any) -> None:
    up = start("up", "digits", "--data", "static", *LONG_UP)
    job = awaited_job(lasting, "digits", 6)
    before = {name: member.incarnation for name, member in job.state().members.items()}
    words = (
        f"the workers of job 'digits' are those of kvps up (process {up.process.pid} on {os.uname().nodename}): "
        f"it hands out no units (--data units), so that one more would have no data; "
        f"kvps create makes a job for workers of your own"
    )
    done = kvps_run("worker", "--job", "digits")
    assert (done.returncode, done.stderr.splitlines()[-1]) == (2, f"kvps: error: {words}")
    assert "Traceback" not in done.stderr
    for worker in (None, "w0", "extra"):
        with pytest.raises(kvps.UsageError) as error:
            job.join(worker)
        assert str(error.value) == words
    assert {name: member.incarnation for name, member in job.state().members.items()} == before


def test_where_units_are_handed_out_others_may_join_under_other_ids(lasting: kvps.Store, start: Any) -> None:
    start("up", "digits", "--data", "units", "-w", "2", *LONG_UP)
    job = awaited_job(lasting, "digits", 6)
    more = [start("worker", "--job", "digits"), start("worker", "--job", "digits", "--id", "extra")]
    for one in more:
        one.until("joined as")
    assert eventually(lambda: {"w2", "extra"} <= job.state().clock.keys() and min(job.state().clock.values()) > 3)
    done = kvps_run("worker", "--job", "digits", "--id", "w1")
    assert done.returncode == 2
    assert "choose another id than w1" in done.stderr.splitlines()[-1]
    with job.join() as session:
        assert session.worker not in ("w0", "w1", "w2", "extra")
        session.leave()


def test_a_job_whose_command_was_killed_is_free(store: kvps.Store) -> None:
    with subprocess.Popen(["sleep", "600"]) as command:
        its = {"pid": command.pid, "start": process.mark(command.pid).rpartition(":")[2]}
        up = json.dumps(json.loads(launcher.this_process("kvps up")) | its)
        job = store.create_job("job", model(), config=JobConfig(metadata=Metadata(launched_by=up)))
        with pytest.raises(kvps.UsageError, match=f"those of kvps up \\(process {command.pid} "):
            job.join()
        command.kill()
    with job.join() as session:
        session.leave(finished=False)


def test_a_copy_of_a_script_may_join_without_an_id_and_nobody_else(
    lasting: kvps.Store, start: Any, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(ENDLESS)
    start("run", "-w", "2", "--", sys.executable, "train.py")
    job = awaited_job(lasting, "train", 6)
    assert set(job.state().clock) == {"w0", "w1"}
    with pytest.raises(kvps.UsageError, match="those of kvps run"):
        job.join()


def test_a_restored_job_is_anybodys(store: kvps.Store) -> None:
    job = store.create_job(
        "job", model(), config=JobConfig(metadata=Metadata(launched_by=launcher.this_process("kvps up")))
    )
    assert store.restore_job(job.checkpoint(), "again").config.metadata.launched_by == ""


def test_of_another_machines_command_nothing_is_known(store: kvps.Store) -> None:
    elsewhere = json.loads(launcher.this_process("kvps up")) | {"host": "far", "space": "another boot", "pid": 7}
    job = store.create_job("job", model(), config=JobConfig(metadata=Metadata(launched_by=json.dumps(elsewhere))))
    with pytest.raises(kvps.UsageError, match=r"kvps up \(process 7 on far\).*if that has ended: kvps checkpoint save"):
        job.join()
    with job.join("w0", takeover=True) as session:
        session.leave(finished=False)


@pytest.mark.parametrize(
    "text", [None, 0, [], "kvps up", "[]", '{"command": "kvps up"}', '{"command": 1, "host": 2, "pid": "x"}']
)
def test_a_launcher_that_is_none_is_refused(store: kvps.Store, text: Any) -> None:
    with pytest.raises(kvps.InvalidSetting, match="launched_by"):
        store.create_job("job", model(), config=JobConfig(metadata=Metadata(launched_by=text)))
    assert store.jobs() == []
