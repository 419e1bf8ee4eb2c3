"""`kvps up`: server, aggregator and workers by one command. Real processes, a real server, real signals."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from helpers.commands import LONG_UP, kvps_run, refused
from helpers.waiting import eventually, processes_of

from kvps.server import private_server

RESULT = re.compile(
    r"1,350 contributions in 240 versions, [\d.]+ s, \d+ contributions/s, test loss [\d.]+\ntest accuracy 0\.9\d+\n"
)


@pytest.mark.slow
def test_up_trains_the_digits_and_reports_it(home: Path, tmp_path: Path) -> None:
    done = kvps_run("up", "digits", "--report", "r.json")
    assert done.returncode == 0, done.stderr
    assert RESULT.fullmatch(done.stdout), "stdout has the results, and stderr what happens"
    assert "look inside: kvps cli" in done.stderr
    assert "version 240  units 1,350 of 1,350  clock " in done.stderr.splitlines()[-2], "before where the weights are"
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["accuracy"] >= 0.95
    assert (report["version"], report["contributions"], sum(report["clock"].values())) == (240, 1350, 1350)
    wanted = "job task workers staleness shards optimizer version contributions clock seconds contributions_per_s"
    wanted += " loss accuracy figures weights_sha256"
    assert list(report) == wanted.split()
    assert private_server.running() is None, "the server ended with the command"
    gone = "the weights are gone with the private server: --checkpoint-every N keeps them in files, and --server-stays "
    assert done.stderr.splitlines()[-1] == f"{gone}SECONDS the server running"


@pytest.mark.slow
def test_ending_up_ends_all_of_it(home: Path, start: Any) -> None:
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGKILL, -9)):
        running = start("up", "digits", *LONG_UP)
        running.until("version")
        assert eventually(lambda: len(processes_of(home)) >= 7)  # up, guard, server, aggregator, three workers
        running.process.send_signal(number)
        said = re.search(r"^leaves job digits at version \d+, before it has finished$", running.output(code), re.M)
        assert bool(said) == (number != signal.SIGKILL)
        assert eventually(lambda: processes_of(home) == []), processes_of(home)
        assert private_server.running() is None


@pytest.mark.slow
def test_a_worker_that_fails_is_named_and_the_others_go_on(home: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(TASK + "\n    def data(self, rank, workers, xp):\n        return DATA[rank]\n")
    done = kvps_run("up", "mine:Task", "--data", "static", "--workers", "2", "--epochs", "3")
    assert done.returncode == 1
    assert "w1: kvps: error: task 'mine:Task' failed: RuntimeError: unlucky (mine.py, line 15" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("kvps: error: job Task: w1 failed; the others went on")


TASK = """
import numpy as np

ones = np.ones(8, np.float32)
DATA = {0: (ones,), 1: (13 * ones,)}

class Task:
    batch_size, epochs, lr = 4, 2, 0.5

    def parameters(self, seed):
        return {"x": np.zeros(3, np.float32)}

    def gradient(self, params, batch, xp):
        if batch[0][0] == 13:
            raise RuntimeError("unlucky")
        return 0.0, {"x": params["x"] - batch[0].mean()}

    def evaluate(self, params, xp):
        return {"loss": float(((params["x"] - 1) ** 2).mean())}
"""


@pytest.mark.slow
def test_a_task_of_the_user(home: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        TASK + "\nclass Good(Task):\n    def data(self, r, w, xp):\n        return (ones,)\n"
    )
    done = kvps_run("up", "mine:Good", "--epochs", "20")
    assert done.returncode == 0, done.stderr
    assert "test loss 0.0000" in done.stdout
    for name, words in [
        ("mine:Missing", "has no 'Missing'"),
        ("mine:DATA", "lacks"),
        ("os:system", "no module 'os' in"),
    ]:
        assert words in refused("up", name)
