"""`kvps run --learner`: a learner and its actors as processes. Each prompt is trained once, whoever is killed."""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.commands import kvps_run, refused
from helpers.waiting import awaited_job

import kvps

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked")]  # each starts whole commands

LEARNER = """
import os, sys, time
import numpy as np, kvps

weights = {"x": np.zeros(100, np.float32)}
rollouts = kvps.Rollouts(prompts=int(sys.argv[1]), epochs=2, group=2, max_staleness=4, capacity=16)
with kvps.connect() as store, store.publisher(None, weights, rollouts=rollouts) as policy:
    policy.load(weights)
    print("begins at", policy.version, flush=True)
    open("learner.pid", "w").write(str(os.getpid()))
    while batch := policy.rollouts.take(groups=2):
        weights["x"] += 1
        time.sleep(0.02)
        policy.publish(weights, trained=batch, loss=1 / (1 + policy.version))
"""
ACTOR = """
import os
import numpy as np, kvps

with kvps.connect() as store, store.watch() as policy:
    policy.load({"x": np.zeros(100, np.float32)})
    open(os.environ["KVPS_ACTOR"] + ".pid", "w").write(str(os.getpid()))
    while (unit := policy.next_unit()) is not None:
        policy.update()
        policy.rollouts.put({"x": policy.arrays["x"][:5].copy()}, version=policy.version, unit=unit)
"""


@pytest.fixture(autouse=True)
def here(home: Path, tmp_path: Path) -> Path:
    """The user's directory, with both scripts in it."""
    (tmp_path / "learn.py").write_text(LEARNER)
    (tmp_path / "act.py").write_text(ACTOR)
    return tmp_path


def line(prompts: int, *options: str) -> list[str]:
    return ["run", "--learner", f"{sys.executable} learn.py {prompts}", "-w", "3", *options, "--", "act.py"]


def trained(store: kvps.Store, name: str, prompts: int) -> None:
    """Check that each prompt of both epochs was trained on once, whole."""
    fates = store.job(name).rollouts.fates()
    assert len({each.id for each in fates}) == len(fates)
    assert {each.fate for each in fates} <= {"trained", "stale"}
    units = Counter(each.unit for each in fates if each.fate == "trained")
    assert units == dict.fromkeys(range(2 * prompts), 2)


def test_it_keeps_both_running_whoever_is_killed(lasting: kvps.Store, here: Path, start: Any) -> None:
    running = start(*line(60, "--job", "policy"))
    for who, beyond in (("learner", 5), ("a1", 15), ("learner", 25)):
        awaited_job(lasting, "policy", beyond)
        os.kill(int((here / f"{who}.pid").read_text()), signal.SIGKILL)
    said = running.output()
    assert said.count("was killed (SIGKILL)") == 3
    assert "its lease of shard 0 ended; started again" in said
    assert said.splitlines()[-1].startswith("job policy: version 60  loss ")
    trained(lasting, "policy", 60)


def test_a_run_that_is_stopped_goes_on_from_its_checkpoint(lasting: kvps.Store, here: Path, start: Any) -> None:
    options = "--job", "policy", "--checkpoints", "kept", "--checkpoint-every", "5", "--resume"
    running = start(*line(60, *options))
    awaited_job(lasting, "policy", 12)
    with lasting.publisher("other", {"x": np.zeros(3, np.float32)}) as other:  # which came since, and is not its own
        running.process.send_signal(signal.SIGTERM)
        said = running.output(os.EX_TEMPFAIL)
        assert "job policy: stopped at version " in said
        assert "other" not in said
        assert other.publish({"x": np.ones(3, np.float32)}) == 1
    before = lasting.job("policy").state().version
    lasting.remove_job("policy")  # as with its server: the newest checkpoint is a little older
    said = start(*line(60, *options)).output()
    assert 0 < int(said.partition("begins at ")[2].split()[0]) <= before
    fates = lasting.job("policy").rollouts.fates(here / "kept")
    units = Counter(each.unit for each in fates if each.fate == "trained")
    assert units == dict.fromkeys(range(120), 2)


def test_what_makes_no_sense_is_one_line(lasting: kvps.Store) -> None:
    assert refused(*line(1, "--staleness", "3")).startswith(
        "--staleness is for workers: with --learner the script says"
    )
    for option in ("--aggregators 2", "-w 2:3", "--record r", "--log csv:x.csv", "--log-keep 5", "--eval-every 2"):
        assert "is for a job that workers train: leave it out with --learner" in refused(*line(1, *option.split()))
    failed = kvps_run("run", "--learner", "learn.py 3", "-w", "1", "--", sys.executable, "-c", "raise SystemExit(3)")
    assert failed.returncode == 1
    assert failed.stderr.splitlines()[-1] == "kvps: error: the run ends: no actor is left (a0 failed)"
    failed = kvps_run("run", "--learner", "none.py", "-w", "1", "--", "act.py")
    assert failed.stderr.splitlines()[-1] == "kvps: error: there is no file 'none.py' to run"
