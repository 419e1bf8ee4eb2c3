"""`kvps run` with an evaluator: nobody waits for it, it may die, and its figures are everywhere. Real processes."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from helpers.arrays import assert_same_bits
from helpers.commands import KVPS, kvps_run, refused, run
from helpers.pages import python_in
from helpers.paths import ROOT
from helpers.torch_process import TorchPopen
from helpers.waiting import awaited_job, eventually
from safetensors import safe_open
from safetensors.numpy import load_file

import kvps
from kvps.history.events import EventLog

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked")]  # each starts whole commands

SCRIPT = """
import os, pathlib, sys, time
from helpers.harness import gradient, model

import kvps

def wait_for(name):
    while not pathlib.Path(name).exists():
        time.sleep(0.01)

with kvps.from_env() as worker:
    job = worker.create_job(model(), optimizer=kvps.SGD(lr=0.05))

    @worker.evaluates(job)
    def evaluate(weights):
        if "fail" in sys.argv:
            raise RuntimeError("unlucky")
        pathlib.Path(f"evaluates-{os.getpid()}").touch()
        wait_for("go")
        return {"size": abs(weights["b"]).sum(), "nan": float("nan")}

    with job.join(worker.id) as session:
        while session.clock < 110:
            if session.clock == 100:
                wait_for("hurry")
            session.push(gradient(session.pull(), session.rank, session.clock), 0.5)
    print("trained", worker.rank, worker.is_evaluator)
"""
EVALUATES = """
import time
import kvps
from helpers.harness import model

with kvps.from_env() as worker:
    assert worker.is_evaluator
    for version, weights in worker.versions():
        print("evaluates", version, sorted(weights) == sorted(model()))
        worker.report(version, {"accuracy": version / 1000})
"""


@pytest.fixture(autouse=True)
def here(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's directory, with scripts in it."""
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "eval.py").write_text(EVALUATES)
    return tmp_path


COMMAND = ["--", sys.executable, "train.py"]


def marks(here: Path) -> list[int]:
    """The processes that have begun to evaluate."""
    return [int(path.name.partition("-")[2]) for path in here.glob("evaluates-*")]


def test_nobody_waits_for_the_evaluator_and_its_figures_are_everywhere(
    lasting: kvps.Store, here: Path, start: Any
) -> None:
    """It is killed while it evaluates an early version, starts again with the newest, and evaluates the last one."""
    kept = ["--eval-every", "10", "--keep-best", "size", "--checkpoints", "kept", "--log", "csv:curve.csv"]
    running = start("run", "-w", "2", *kept, *COMMAND)
    assert eventually(lambda: bool(marks(here)))
    (killed,) = marks(here)
    job = awaited_job(lasting, "train", 100)
    assert job.state().version == 100, "all of them, while one evaluation goes on"
    assert job.evaluation() is None
    os.kill(killed, signal.SIGKILL)
    running.until(f"evaluator (process {killed}) was killed (SIGKILL): started again as process ")
    assert eventually(lambda: len(marks(here)) == 2)
    (here / "go").touch()
    assert eventually(lambda: job.evaluation() is not None)
    (here / "hurry").touch()
    output = running.output()
    assert output.count("trained") == 2
    assert "True" not in output, "the evaluator ends at evaluates"
    best = next((here / "kept/best").iterdir())
    assert f"best size: version {json.loads(version_of(best))}: size " in output

    newest = job.evaluation()
    assert newest
    assert (newest.version, newest.by, [*newest.figures]) == (110, "evaluator", ["size", "nan"])
    assert_last_is_in_all_places(here, newest.figures["size"])
    assert (here / "kept/best").stat().st_mode & 0o777 == 0o700
    if version_of(best) == "110":
        assert_same_bits(load_file(best), job.snapshot()[1])
    listed = kvps_run("checkpoint", "ls", "kept")
    assert best.name not in listed.stdout + listed.stderr


def version_of(path: Path) -> str:
    with safe_open(path, "numpy") as file:
        return file.metadata()["version"]


def assert_last_is_in_all_places(here: Path, size: float) -> None:
    """Log, status, and curves."""
    events = [json.loads(line) for line in kvps_run("log", "train", "-n", "0", "--json").stdout.splitlines()]
    evaluated = [event["version"] for event in events if event["event"] == "evaluate"]
    assert evaluated[0] == 100, "the newest, when it was started again"
    assert evaluated[-1] == 110
    assert (
        f"evaluate   version 110: size {size:.6g}, nan nan, by evaluator" in kvps_run("log", "train", "-n", "0").stdout
    )
    assert f"evaluation of version 110: size {size:.6g}, nan nan, by evaluator" in kvps_run("status", "train").stdout
    told = json.loads(kvps_run("status", "train", "--json").stdout)["evaluation"]
    assert told == {"version": 110, "figures": {"size": size, "nan": None}, "by": "evaluator", "at_ms": told["at_ms"]}
    with (here / "curve.csv").open(newline="") as file:
        rows = [(row["version"], row["eval/size"]) for row in csv.DictReader(file) if row["eval/size"]]
    assert rows[-1] == ("110", f"{size:.9g}")


def test_an_evaluator_of_its_own_that_fails_is_given_up(lasting: kvps.Store, here: Path) -> None:
    for name in ("go", "hurry"):
        (here / name).touch()
    own = f"{sys.executable} eval.py"
    done = kvps_run("run", "--job", "good", "--evaluator", own, "--keep-best", "accuracy:max", *COMMAND)
    assert done.returncode == 0, done.stderr
    assert "evaluator: evaluates 110 True\n" in done.stdout
    assert "best accuracy:max: version 110: accuracy 0.11, kept in " in done.stderr
    assert lasting.job("good").evaluation().figures == {"accuracy": 0.11}  # type: ignore[union-attr]

    done = kvps_run("run", "--job", "bad", "--eval-every", "10", *COMMAND, "fail")
    assert done.returncode == 0, done.stderr
    assert "w0: trained 0 False\n" in done.stdout
    assert done.stderr.count("RuntimeError: unlucky") == 4
    assert done.stderr.count(" failed (code 1): started again as process ") == 3
    assert done.stderr.count(" failed (code 1) again: the training goes on without evaluations\n") == 1

    (here / "go").unlink()
    done = kvps_run("run", "--job", "late", "--eval-every", "10", "--eval-grace", "0.5", *COMMAND)
    assert done.returncode == 0, done.stderr
    assert " is ended before it has evaluated the last version: 0.5 s are over (--eval-grace)\n" in done.stderr

    (here / "joins.py").write_text(SCRIPT.replace("@worker.evaluates(job)", ""))
    done = kvps_run("run", "--job", "joins", "-w", "1", "--eval-every", "10", "--", sys.executable, "joins.py")
    assert done.returncode == 0, done.stderr
    assert (
        "evaluator: kvps: error: this process evaluates the job, and is no worker of it: have @worker.eval"
        in done.stderr
    )
    assert set(lasting.job("joins").state().members) == {"w0"}


def test_the_scripts_of_the_page(lasting: kvps.Store, here: Path) -> None:
    """A model of PyTorch with the optimizer of its library, and the two loops."""
    in_script, _, own, anywhere = python_in("docs/evaluation.md")
    (here / "train.py").write_text(in_script)
    (here / "eval.py").write_text(own)
    done = run([*KVPS, "run", "-w", "3", "--eval-every", "20", "--keep-best", "loss", *COMMAND], popen=TorchPopen)
    assert done.returncode == 0, done.stdout + done.stderr
    (said,) = re.findall(r"^best loss: (version 60: loss \S+), kept in (\S+)$", done.stderr, re.MULTILINE)
    shown = re.findall(r"version 60: loss (\S+), ", (ROOT / "docs/evaluation.md").read_text())
    assert [float(each) for each in shown] == [pytest.approx(float(said[0].split()[-1]), rel=1e-3)] * 2
    assert f"evaluation of {said[0]}, by evaluator" in kvps_run("status", "train").stdout
    model = torch.nn.Linear(8, 1)
    model.load_state_dict(safetensors.torch.load_file(said[1]))
    assert_same_bits({n: p.detach().numpy() for n, p in model.named_parameters()}, lasting.job("train").snapshot()[1])
    exec(anywhere, {})
    newest = lasting.job("train").evaluation()
    assert newest
    assert (newest.version, [*newest.figures]) == (60, ["largest"])
    own_one = ["--job", "own", "-w", "1", "--evaluator", f"{sys.executable} eval.py"]
    done = run([*KVPS, "run", *own_one, *COMMAND], popen=TorchPopen)
    assert done.returncode == 0, done.stdout + done.stderr
    newest = lasting.job("own").evaluation()
    assert newest
    assert (newest.version, [*newest.figures]) == (60, ["norm"])


def test_the_evaluator_ends_the_run(lasting: kvps.Store, here: Path) -> None:
    """What the page says of that, with a loss that is no better soon."""
    in_script, early, *_ = python_in("docs/evaluation.md")
    before, behind = in_script.partition("@kvps.torch")[0], in_script[in_script.index("optimizer = ") :]
    early = early.replace("len(losses) > 5 and min(losses[-5:]) > min(losses)", "len(losses) > 2")
    (here / "train.py").write_text(before + early + behind.replace("range(60)", "range(1_000_000)"))
    done = run([*KVPS, "run", "-w", "2", "--eval-every", "20", *COMMAND], popen=TorchPopen)
    assert done.returncode == 0, done.stdout + done.stderr
    job = lasting.job("train")
    state, newest = job.state(), job.evaluation()
    assert newest
    assert state.clock == {"w0": state.version, "w1": state.version}, "all end with the same round"
    assert newest.version == state.version
    logged = [json.loads(line) for line in kvps_run("log", "train", "-n", "0", "--json").stdout.splitlines()]
    (stop,) = [event for event in logged if event["event"] == "stop"]
    assert (stop["by"], stop["reason"]) == ("evaluator", "the loss was no better for 5 evaluations")


def test_a_run_that_is_stopped_and_resumed_is_evaluated_to_its_end(lasting: kvps.Store, here: Path, start: Any) -> None:
    """Nothing is evaluated twice, and a second SIGTERM ends the wait for an evaluation."""
    (here / "go").touch()
    command = ["run", "-w", "1", "--eval-every", "10", "--checkpoints", "kept", "--resume", *COMMAND]
    running = start(*command)
    job = awaited_job(lasting, "train")
    assert eventually(lambda: (e := job.evaluation()) is not None and e.version == 100), "where the worker waits"
    running.process.send_signal(signal.SIGTERM)
    assert eventually(lambda: job.state().run.state == "suspended")
    (here / "hurry").touch()
    assert running.wait() == 75
    (here / "go").unlink()
    running = start(*command)
    assert eventually(lambda: job.state().finished(job.config))
    running.process.send_signal(signal.SIGTERM)
    running.until(" is ended before it has evaluated the last version: the run is stopped")
    assert running.wait() == 0
    events = EventLog(job.access.client, job.access.keys).newest(0)
    logged = [e.facts["version"] for e in events if e.kind == "evaluate"]
    assert len(logged) == len(set(logged))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--keep-best", "loss"], "--keep-best is for versions that are evaluated: give --eval-every or --evaluator"),
        (["--eval-every", "5", "--keep-best", "loss:best"], "as in loss or accuracy:max, not 'loss:best'"),
        (["--evaluator", "nothing-of-this-name x"], "there is no program 'nothing-of-this-name' to run"),
        (["--evaluator", 'python "eval.py'], '--evaluator python "eval.py: No closing quotation'),
        (["--evaluator", ""], "there is nothing to run"),
    ],
)
def test_what_cannot_be_evaluated(here: Path, arguments: list[str], words: str) -> None:
    assert words in refused("run", *arguments, *COMMAND)
