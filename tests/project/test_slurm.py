"""The files of deploy/slurm, run on this machine: programs in place of Slurm's start each step at once."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.command_lines import check_parses, commands_in
from helpers.paths import ROOT
from helpers.waiting import command_lines_with, eventually

SCRIPT = ROOT / "deploy" / "slurm" / "kvps.sbatch"
RUN = SCRIPT.with_name("run.sbatch")
SRUN = """#!/bin/sh
while case $1 in --*) true ;; *) false ;; esac; do shift; done
exec "$@"
"""
PROGRAMS = {
    "srun": SRUN,
    "scontrol": '#!/bin/sh\n[ "$1" != requeue ] || echo "$2" >> "$SLURM_SUBMIT_DIR/requeued"\necho localhost\n',
    "kvps": f'#!/bin/sh\nexec {sys.executable} -m kvps "$@"\n',
    "python3": f'#!/bin/sh\nexec {sys.executable} "$@"\n',
}


def test_each_command_has_the_options_of_this_version() -> None:
    text = SCRIPT.read_text().replace('"$@"', "digits")
    found = list(commands_in(text))
    assert [words[:2] for words in found] == [
        ["checkpoint", "save"],
        ["jobs"],
        ["checkpoint", "restore"],
        ["create", "digits"],
        ["aggregator", "start"],
        ["worker", "--job"],
        ["status", "1"],
    ]
    run, jobs = commands_in(RUN.read_text().replace("--stop-grace 60)", "--stop-grace 60 --hosts 1 -- python train.py"))
    for words in (*found, run, jobs):
        check_parses(words)


def test_bash_understands_it_and_no_variable_has_the_password() -> None:
    for script in (SCRIPT, RUN):
        subprocess.run(["bash", "-n", script], check=True)
    for text in (SCRIPT.read_text(), RUN.read_text()):
        assert re.search(r"^umask 077$", text, re.MULTILINE)
        assert not re.search(r"\b(KVPS_PASSWORD|REDISCLI_AUTH|VALKEYCLI_AUTH)\b|redis://[^$]*@", text)
        assert text.count("$(cat ") == 1, "only the server's configuration, on its standard input"


@pytest.fixture
def slurm(tmp_path: Path, home: Path) -> dict[str, str]:
    """The environment of a job of five tasks."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in PROGRAMS.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o700)
    return os.environ | {
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ["PYTHONPATH"]]),
        "SLURM_NTASKS": "5",
        "SLURM_JOB_ID": str(_job_id()),
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "KVPS_DIR": str(tmp_path / "run"),
        "KVPS_CHECKPOINT_EVERY": "20",
    }


def _started(slurm: dict[str, str], script: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start a script in a session of its own, as Slurm does."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(["bash", script, *arguments], env=slurm, text=True, start_new_session=True, **streams)


def _run(slurm: dict[str, str], script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", script, *arguments], env=slurm, capture_output=True, text=True, timeout=200)


def _job_id() -> int:
    """A job's id whose port is free."""
    for number in range(os.getpid() % 10000, 20000):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", 20000 + number % 10000)):
                return number
    raise AssertionError("no port is free")


@pytest.mark.slow
def test_a_job_that_is_ended_goes_on_from_its_newest_checkpoint(slurm: dict[str, str], tmp_path: Path) -> None:
    checkpoints = tmp_path / "run" / "checkpoints"
    first = _started(slurm, SCRIPT, "digits", "--epochs", "40", "--batch-size", "48")
    try:
        assert eventually(lambda: len(list(checkpoints.glob("*.safetensors"))) > 1 or first.poll() is not None)
        password = tmp_path / "run" / "password"
        assert password.stat().st_mode & 0o777 == 0o600
        secret = password.read_text().strip()
        assert not command_lines_with(secret)
    finally:
        os.killpg(first.pid, signal.SIGTERM)
        printed = first.communicate(timeout=120)[0]
    assert first.returncode != 0
    assert secret not in printed
    assert not password.exists()

    done = _run(slurm, SCRIPT, "digits")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"job train: continues from version \d+ of ", done.stderr)
    assert done.stderr.count("this worker has done its rounds") == 2
    assert re.search(r"^train +finished ", done.stdout, re.MULTILINE)


@pytest.mark.slow
def test_before_the_time_limit_the_newest_version_is_saved_and_the_job_requeued(
    slurm: dict[str, str], tmp_path: Path
) -> None:
    seldom = slurm | {"KVPS_CHECKPOINT_EVERY": "100000"}
    first = _started(seldom, SCRIPT, "digits", "--epochs", "40", "--batch-size", "48")
    assert first.stdout
    for line in first.stdout:
        if "job train" in line:
            break
    first.send_signal(signal.SIGTERM)  # to the script alone, as --signal=B:TERM does
    printed = first.communicate(timeout=120)[0]
    assert first.returncode == 75, printed
    assert "job train: version " in printed
    assert (tmp_path / "requeued").read_text() == f"{slurm['SLURM_JOB_ID']}\n"
    assert list((tmp_path / "run" / "checkpoints").glob("train.*.safetensors"))


SCRIPT_OF_ONES_OWN = """
import time
from pathlib import Path

import kvps
from helpers.harness import gradient, model

with kvps.from_env() as worker:
    job = worker.create_job(model(), optimizer=kvps.SGD(lr=0.05))
    with job.join(worker.id) as session:
        while session.clock < 200:
            params = session.pull()
            if not Path("hurry").exists():
                Path("began").touch()
                time.sleep(0.05)
            session.push(gradient(params, session.rank, session.clock))
"""


@pytest.mark.slow
@pytest.mark.parametrize("nodes", ["1", "2"])
def test_a_script_of_ones_own_is_stopped_requeued_and_goes_on(
    slurm: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodes: str
) -> None:
    """SIGTERM comes to one host; the copies of the other end too."""
    monkeypatch.chdir(tmp_path)
    slurm["SLURM_NNODES"] = nodes
    (tmp_path / "train.py").write_text(SCRIPT_OF_ONES_OWN)
    command = (RUN, "-w", "2", "--", "python3", "train.py")
    first = _started(slurm, *command)
    assert eventually(lambda: (tmp_path / "began").exists() or first.poll() is not None)
    first.send_signal(signal.SIGTERM)
    printed = first.communicate(timeout=120)[0]
    assert first.returncode == 75, printed
    assert "can be resumed: the same command goes on\n" in printed
    assert (tmp_path / "requeued").read_text() == f"{slurm['SLURM_JOB_ID']}\n"
    (tmp_path / "hurry").touch()
    done = _run(slurm, *command)
    assert done.returncode == 0, done.stderr
    assert re.search(r"job train: goes on at version \d+, from ", done.stderr)
    assert done.stderr.count("400 contributions in 200 versions") == int(nodes)
    assert not (tmp_path / "run" / "password").exists()


@pytest.mark.parametrize(("tasks", "arguments"), [("3", ["digits"]), ("5", [])])
def test_too_few_tasks_or_no_arguments_get_one_line(slurm: dict[str, str], tasks: str, arguments: list[str]) -> None:
    done = _run(slurm | {"SLURM_NTASKS": tasks}, SCRIPT, *arguments)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("usage: sbatch --ntasks=N")
    assert not Path(slurm["KVPS_DIR"]).exists()


@pytest.mark.slow
def test_a_setting_that_kvps_refuses_ends_the_job_and_its_server(slurm: dict[str, str]) -> None:
    done = _run(slurm, SCRIPT, "digits", "--staleness", "x")
    assert (done.returncode, done.stdout) == (2, "")
    assert "kvps: error: " in done.stderr.splitlines()[-1]
