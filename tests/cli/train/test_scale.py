"""Jobs with units while workers come and go: `kvps run` and `kvps up -w MIN:MAX`, `kvps scale`, and copies that are
started by hand. Real processes; who did which unit is read from the log."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.commands import KVPS, LONG, Started, kvps_run, refused
from helpers.harness import ends_of_units, log_entries, model
from helpers.waiting import awaited_job, eventually

import kvps
from kvps.config import JobConfig, Metadata
from kvps.history.log_stream import LogStream
from kvps.job import Job
from kvps.machine import launcher
from kvps.protocol.keys import JobKeys

pytestmark = pytest.mark.slow  # each starts whole commands

UNITS, SETTINGS = 400, {"units": 400, "units_per_round": 4}
SCRIPT = f"""
import pathlib, time
import kvps
from helpers.harness import gradient, model

with kvps.from_env() as worker:
    job = worker.create_job(model(), optimizer=kvps.SGD(lr=0.05), **{SETTINGS})
    with job.join(worker.id) as session:
        while (unit := session.next_unit()) is not None:
            params = session.pull()
            if not pathlib.Path("hurry").exists():
                time.sleep(0.3)
            session.push(gradient(params, 0, unit))
    print(worker.rank, worker.workers, worker.id)
"""


@pytest.fixture(autouse=True)
def here(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's directory, with a script in it that takes its time until there is a file `hurry`."""
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "static.py").write_text(SCRIPT.replace(f", **{SETTINGS}", ""))
    return tmp_path


def at_work(job: Job) -> set[str]:
    return {member.worker for member in job.state().members.values() if member.active}


def scaled(job: str, workers: int) -> str:
    """What `kvps scale` says."""
    done = kvps_run("scale", job, str(workers))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (0, "", 1), done.stderr
    return done.stderr.rstrip("\n")


def check_units(job: Job, units: int) -> None:
    """Each unit is in exactly one commit."""
    counted = [c.unit for commit in job.log() for c in commit.plan.contributions]
    assert sorted(map(int, counted)) == list(range(units))


def test_a_run_keeps_as_many_copies_as_it_is_told_and_one_more_joins_by_hand(
    lasting: kvps.Store, here: Path, start: Any
) -> None:
    running = start("run", "-w", "1:3", "--", sys.executable, "train.py")
    job = awaited_job(lasting, "train")
    assert job.config.workers == 1
    assert eventually(lambda: at_work(job) == {"w0", "w1", "w2"})
    killed = job.state().members["w1"].pid
    os.kill(killed, signal.SIGKILL)
    running.until(f"w1 (process {killed}) was killed (SIGKILL): ")
    assert eventually(lambda: at_work(job) == {"w0", "w1", "w2"})

    assert scaled("train", 1) == "job train: from 3 to 1 worker: 2 are asked to leave"
    running.until("was asked to leave, and left")
    assert eventually(lambda: at_work(job) == {"w0"})
    assert scaled("train", 1) == "job train: 1 worker, as before"

    more = Started([sys.executable, "train.py"], os.environ | {"KVPS_JOB": "train"})
    assert eventually(lambda: len(at_work(job)) == 2)
    (by_hand,) = at_work(job) - {"w0"}
    assert re.fullmatch("x[0-9a-f]{6}", by_hand)
    assert eventually(lambda: job.state().clock[by_hand] > 2)

    with job.join() as session:
        assert session.worker == "w3", "w1 and w2 are those of kvps run"
        session.leave(finished=False)
    assert scaled("train", 3) == "job train: from 1 to 3 workers: 2 more start"
    assert eventually(lambda: at_work(job) == {"w0", "w1", "w2", by_hand})
    assert "keeps 1 to 3 workers of job 'train', not 4" in refused("scale", "train", "4")
    assert "not 0" in refused("scale", "train", "0")

    (here / "hurry").touch()
    assert more.output() == f"3 1 {by_hand}\n"
    assert "w2: 2 1 w2" in running.output()
    check_units(job, UNITS)
    for name, array in ends_of_units(**SETTINGS).items():
        assert job.snapshot()[1][name].tobytes() == array.tobytes(), "whoever came and went"
    logged = [f for f in LogStream(job.access).page("0-0") if f[1]["kind"] == "scale"]
    assert [(f["before"], f["workers"]) for _, f in logged] == [("3", "1"), ("1", "3")]
    assert "from 1 to 3 workers" in kvps_run("log", "train", "-n", "0").stdout
    assert "no kvps up or kvps run keeps the workers of job 'train'" in refused("scale", "train", "2")


def test_a_copy_that_is_called_back_while_it_leaves_is_started_again(
    lasting: kvps.Store, here: Path, start: Any
) -> None:
    """It takes its time, and the signal: it is stopped meanwhile."""
    running = start("run", "-w", "1:2", "--", sys.executable, "train.py")
    job = awaited_job(lasting, "train")
    assert eventually(lambda: at_work(job) == {"w0", "w1"})
    leaving = job.state().members["w1"].pid
    os.kill(leaving, signal.SIGSTOP)
    scaled("train", 1)
    assert eventually(lambda: any(f["kind"] == "scale" for _, f in log_entries(job)))
    scaled("train", 2)
    assert eventually(lambda: sum(f["kind"] == "scale" for _, f in log_entries(job)) == 2)
    os.kill(leaving, signal.SIGCONT)
    said = running.until("started again as process").splitlines()[-1]
    assert said.startswith(f"w1 (process {leaving}) was asked to leave, and left: ")
    assert eventually(lambda: at_work(job) == {"w0", "w1"})
    (here / "hurry").touch()
    assert running.wait() == 0
    check_units(job, UNITS)


def test_the_workers_of_up_are_scaled_and_others_join_them(lasting: kvps.Store, start: Any) -> None:
    up = start("up", "digits", "-w", "1:3", "--data", "units", *LONG, "--slow", "w0=30x", "--slow", "w2=30x")
    job = awaited_job(lasting, "digits")
    assert eventually(lambda: at_work(job) == {"w0", "w1", "w2"})
    assert scaled("digits", 1) == "job digits: from 3 to 1 worker: 2 are asked to leave"
    assert eventually(lambda: at_work(job) == {"w0"})
    left = [f["worker"] for _, f in log_entries(job) if f["kind"] == "leave"]
    assert sorted(left) == ["w1", "w2"], "they were not evicted"
    more = start("worker", "--job", "digits")
    more.until("joined as w3")
    assert eventually(lambda: job.state().clock["w3"] > 3)
    assert up.end() == 128 + signal.SIGTERM


# -- what is refused ------------------------------------------------------------------------------------------------


def test_what_has_no_units_is_refused_in_one_line_that_says_so(lasting: kvps.Store, here: Path) -> None:
    done = kvps_run("run", "-w", "1:2", "--", sys.executable, "static.py")
    assert done.returncode == 1
    words = "kvps: error: kvps run -w 1:2 is for a job that hands out units, which any number of workers shares: "
    assert f"w0: {words}" in done.stderr
    assert "Traceback" not in done.stderr
    assert "--data units" in refused("up", "digits", "-w", "1:2", "--data", "static")
    assert "--data units" in refused("submit", "digits", "-w", "1:2", "--data", "static")
    lasting.create_job("static", model())
    by_hand = subprocess.run(
        [sys.executable, "static.py"], env=os.environ | {"KVPS_JOB": "static"}, capture_output=True, text=True
    )
    assert by_hand.returncode == 1
    (line,) = by_hand.stderr.splitlines()
    assert line.startswith(
        "kvps: error: KVPS_JOB=static: that job hands out no units, so that one more copy would have"
    )


def _launched(by: str) -> JobConfig:
    return JobConfig(workers=2, units=9, metadata=Metadata(launched_by=by))


def test_scale_says_why_nothing_happens(lasting: kvps.Store, here: Path) -> None:
    assert "no job 'none'" in refused("scale", "none", "2", code=1)
    lasting.create_job("free", model(), units=9)
    assert "no kvps up or kvps run keeps the workers of job 'free': start more with its own" in refused(
        "scale", "free", "2"
    )
    lasting.create_job("fixed", model(), config=_launched(launcher.this_process("kvps run", 2)))
    words = (
        f"kvps run (process {os.getpid()} on {os.uname().nodename}) keeps 2 workers of job 'fixed': --workers MIN:MAX"
    )
    assert words in refused("scale", "fixed", "2")
    lasting.create_job("deaf", model(), config=_launched(launcher.this_process("kvps run", 3)))
    assert "does not keep the workers of job 'deaf' now" in refused("scale", "deaf", "3", code=1)
    assert lasting.client.call("EXISTS", JobKeys("deaf").copies) == 0
    far = json.loads(launcher.this_process("kvps up", 3)) | {"host": "far", "space": "another boot", "pid": 7}
    lasting.create_job("far", model(), config=_launched(json.dumps(far)))
    lasting.client.call("SET", JobKeys("far").copies, 3)
    assert scaled("far", 2) == "job far: from 3 to 2 workers: 1 is asked to leave"


def test_scale_waits_for_the_command_that_has_not_looked_at_its_job_yet(lasting: kvps.Store) -> None:
    lasting.create_job("new", model(), config=_launched(launcher.this_process("kvps run", 3)))

    def tries() -> int:
        return int(lasting.client.call("INFO", "commandstats")["cmdstat_set"]["calls"])

    before = tries()
    scale = Started([*KVPS, "scale", "new", "2"])
    assert eventually(lambda: tries() >= before + 2)
    lasting.client.call("SET", JobKeys("new").copies, 3)
    assert scale.output() == "job new: from 3 to 2 workers: 1 is asked to leave\n"
