"""The private server of a run stays for a while, so that people can look at what it has trained."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from helpers.commands import TINY, kvps_run, refused
from helpers.harness import model
from helpers.waiting import eventually, processes_of
from kvps_cli import finished_runs

import kvps
from kvps.config import Metadata
from kvps.machine import launcher
from kvps.server import private_server


@pytest.fixture
def ends(home: Path) -> Iterator[None]:
    """A server that stays ends with the test."""
    yield
    private_server.stop()


@pytest.mark.slow
@pytest.mark.usefixtures("ends")
def test_a_finished_run_can_be_looked_at(home: Path, tmp_path: Path) -> None:
    up = kvps_run("up", "digits", *TINY, KVPS_SERVER_STAYS="600")
    assert up.returncode == 0, up.stderr
    assert "(ends 10 minutes after its last use)" in up.stderr
    look = "kvps log digits, kvps timeline digits -o run.svg, kvps inspect digits"
    assert up.stderr.splitlines()[-1] == f"the weights and the log stay for 10 minutes: {look}"
    for command in ("log", "timeline -o run.perfetto-trace", "inspect", "verify", "status"):
        done = kvps_run(*command.split(), "digits")
        assert done.returncode == 0, (command, done.stderr)
    again = kvps_run("up", "digits", *TINY)
    assert again.stderr.splitlines()[-1].startswith("the weights and the log stay for 10 minutes: kvps log digits-2,")
    listed = json.loads(kvps_run("jobs", "--json").stdout)
    assert [(job["job"], job["state"]) for job in listed] == [("digits", "finished"), ("digits-2", "finished")]
    assert "your private server runs already" in refused("up", "digits", "--listen", "127.0.0.1:1", code=1)
    assert kvps_run("server", "stop").stderr == "private server ended\n"


@pytest.mark.slow
def test_it_ends_when_nobody_has_used_it_for_that_time(home: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import kvps, numpy as np\n"
        "with kvps.from_env() as worker:\n"
        "    job = worker.create_job({'x': np.zeros(3, np.float32)})\n"
        "    with job.join(worker.id) as session:\n"
        "        session.push(dict(session.pull()))\n"
    )
    run = kvps_run("run", "-w", "1", "--server-stays", "1", "--", sys.executable, "train.py")
    look = "kvps log train, kvps timeline train -o run.svg, kvps inspect train"
    assert run.stderr.splitlines()[-1] == f"the weights and the log stay for 1 second: {look}"
    assert eventually(lambda: processes_of(home) == [])
    assert "no private server runs" in refused("log", "train", code=1)
    nothing = kvps_run("run", "-w", "1", "--server-stays", "600", "--", sys.executable, "-c", "pass")
    assert nothing.returncode == 0
    assert eventually(lambda: processes_of(home) == []), "a run without a job leaves nothing to look at"


def _left(stays_s: float) -> None:
    """Start the private server, and leave it with a job."""
    with kvps.connect(stays_s=stays_s) as store:
        if not store.jobs():
            store.create_job("job", model())
        store.keep_server()


def test_a_command_that_begins_when_it_ends_meets_it_or_starts_another(home: Path) -> None:
    def look(wait_s: float) -> int:
        time.sleep(wait_s)
        with kvps.connect() as store:
            return len(store.jobs())

    found = set[int]()
    with ThreadPoolExecutor(2) as both:
        for wait_s in (0.0, 0.2, 0.25, 0.3):
            _left(0.1)
            found.update(both.map(look, (wait_s, wait_s)))
    assert found <= {0, 1}


def test_it_ends_with_its_guard(home: Path) -> None:
    _left(600)
    assert private_server.running()
    guards = subprocess.run(["pgrep", "-f", f"watchdog.py .*{home}/redis.sock"], capture_output=True, text=True)
    os.kill(int(guards.stdout), signal.SIGKILL)
    assert eventually(lambda: processes_of(home) == [])
    with kvps.connect() as store:
        assert store.jobs() == []


def _launched_by(pid: int) -> str:
    return json.dumps(json.loads(launcher.this_process("kvps up", 1)) | {"pid": pid})


def test_the_oldest_of_many_finished_runs_are_removed(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And none that is at work, or that no command launched."""
    with subprocess.Popen(["true"]) as ended:
        pass
    with kvps.connect(stays_s=600) as store:
        config = {"workers": 1, "worker_timeout_ms": 60_000}
        store.create_job("made-by-hand", model(), **config)
        store.create_job(
            "alive", model(), config=kvps.JobConfig(**config, metadata=Metadata(launched_by=_launched_by(os.getpid())))
        )
        for number in range(9):
            of_run = kvps.JobConfig(**config, metadata=Metadata(launched_by=_launched_by(ended.pid)))
            store.create_job(f"run-{number}", model(), config=of_run)
        with store.job("run-0").join("w0", takeover=False) as at_work:
            finished_runs.make_room(store, quiet=True)
            at_work.pull()
        left = {"made-by-hand", "alive", "run-0", *(f"run-{number}" for number in range(2, 9))}
        assert set(store.jobs()) == left
        assert finished_runs.may_stay(store)
        monkeypatch.setattr(os, "sysconf", lambda _: 1)
        assert not finished_runs.may_stay(store), "they fill the memory"


def test_a_server_that_lasts_loses_no_job(lasting: kvps.Store) -> None:
    with subprocess.Popen(["true"]) as ended:
        pass
    for number in range(9):
        config = kvps.JobConfig(workers=1, metadata=Metadata(launched_by=_launched_by(ended.pid)))
        lasting.create_job(f"run-{number}", model(), config=config)
    finished_runs.make_room(lasting, quiet=True)
    assert len(lasting.jobs()) == 9
