"""`kvps verify` as a user meets it, behind `kvps up` and behind parts started by hand."""

from __future__ import annotations

import json
import re
from hashlib import sha1
from pathlib import Path

import numpy as np
import pytest
from helpers.commands import TINY, kvps_run, refused
from helpers.harness import aggregating, gradient, log_entries, model, work

import kvps

pytestmark = pytest.mark.slow  # each starts whole commands

TASK = """
import os
import numpy as np

data = np.arange(40, dtype=np.float32)

class Task:
    batch_size, epochs, lr = 4, 3, 0.5

    def parameters(self, seed):
        return {"x": np.full(3, seed, np.float32)}

    def data(self, rank, workers, xp):
        return (data[rank::workers],)

    def gradient(self, params, batch, xp):
        threads = int(os.environ["OPENBLAS_NUM_THREADS"])  # whoever computes must have chosen
        return 0.0, {"x": params["x"] * threads - batch[0].mean()}

    def evaluate(self, params, xp):
        return {"loss": 0.0}
"""


def _verified(*arguments: str, **environment: str) -> list[str]:
    done = kvps_run("verify", *arguments, "--quiet", **environment)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout.splitlines()


def test_what_up_trained_is_verified(lasting: kvps.Store) -> None:
    options = ["--job", "job", "-s", "1", "--shards", "2", "--record", "kept", "--report", "r.json"]
    assert kvps_run("up", "digits", "--epochs", "2", *options).returncode == 0
    report, state = json.loads(Path("r.json").read_text()), lasting.job("job").state()
    chain, replayed, weights = _verified("job")
    whole = f"chain       {state.version} commits, 90 contributions: unbroken, ends at the job's head"
    assert chain == f"{whole} {state.head[:12]}"
    assert replayed == f"recomputed  {state.version} of {state.version} commits bit-identical"
    assert f"sha256 {report['weights_sha256']}: in Redis as made by the replay" in weights
    proof = json.loads(_verified("job", "--record", "kept", "--json")[0])
    assert (proof["by"], proof["replayed"], proof["differs"]) == ("recorded", state.version, "")


def _with_authors_swapped(plan: str) -> str:
    """Say that each of two workers has pushed the gradient of the other."""
    return re.sub(r'(w0 [^"]*) (\w+)","(w1 [^"]*) (\w+)"', r'\1 \4","\3 \2"', plan)


def test_a_log_that_was_written_anew_has_not_the_head_that_was_noted(store: kvps.Store) -> None:
    """A worker may do that. Each entry fits the one before, and says that another has pushed what he did."""
    job = store.create_job("job", model(), workers=2)
    with aggregating(job):
        work(job, 3, lambda session, params, round_: gradient(params, session.rank, round_), 2)
        job.await_finished()
    where, noted, keys = {"KVPS_REDIS_URL": store.url}, job.state().head, job.access.keys
    assert f"noted       version 3 has the head {noted[:12]}" in _verified("job", "--head", noted[:12], **where)
    entries, head = list(log_entries(job)), job.state().begin.head
    store.client.call("DEL", keys.commits)
    for _, fields in entries:
        if fields["kind"] == "commit":
            plan = _with_authors_swapped(fields["plan"]).replace(json.loads(fields["plan"])["head"], head)
            head = sha1(f"{head}\n{plan}\n{fields['shards']}".encode()).hexdigest()
            fields |= {"plan": plan, "head": head}
        store.client.call("XADD", keys.commits, "*", *(part for pair in fields.items() for part in pair))
    store.client.call("HSET", keys.version, "head", head)
    assert _verified("job", **where)[0].startswith("chain       3 commits, 6 contributions: unbroken")
    done = kvps_run("verify", "job", "--quiet", "--head", noted, **where)
    assert done.returncode == 1
    assert f"kvps: error: job job: no version has the head {noted}" in done.stderr
    assert "12 to 40 hexadecimal digits" in refused("verify", "job", "--head", "main", **where)


def test_a_task_that_changed_is_told_from_one_that_did_not(
    lasting: kvps.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(TASK)
    options = ["--job", "job", "--seed", "3", "--workers", "2", "--data", "static"]
    monkeypatch.delenv("OPENBLAS_NUM_THREADS")
    assert kvps_run("up", "mine:Task", *options).returncode == 0
    assert "15 of 15" in _verified("job")[1], "it has chosen as the workers have"
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    for change, words in [
        (("np.arange(40", "1 + np.arange(40"), "commit 1: contribution 1 of w0 (round 1, on version 0): shard 0: task"),
        (("rank::workers", "rank::1"), "commit 1: contribution 1 of w0"),
        (("seed, np", "1 + seed, np"), "commit 1: contribution 1 of w0"),
        (("- batch[0].mean()", "- batch[1]"), "task 'mine:Task' failed: IndexError"),
        (("np.full(3", "np.full(4"), "version 0: parameter 'x' has shape (4,)"),
        (("class Task", "class Other"), "has no 'Task'"),
    ]:
        file.write_text(TASK.replace(*change))
        done = kvps_run("verify", "job", "--quiet")
        assert (done.returncode, done.stderr.count("\n")) == (1, 1)
        assert done.stderr.startswith("kvps: error: job job: ")
        assert words in done.stderr
        assert "15 commits, 30 contributions: unbroken" in done.stdout, "what was proved is said all the same"
        assert "0 of 15 commits" in done.stdout
    file.write_text(TASK)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert "run kvps where your task is" in kvps_run("verify", "job").stderr


def test_how_little_can_be_proved_is_said(lasting: kvps.Store, tmp_path: Path) -> None:
    lasting.create_job("job", {"x": np.zeros(3, np.float32)})
    chain, replayed = _verified("job")
    assert chain.startswith("chain       0 commits, 0 contributions: unbroken")
    assert replayed == "replayed    nothing: no task computes its gradients again, and no --record DIR was given"
    for arguments, code, words in [
        (["verify", "nothing", "-q"], 1, "no job 'nothing'"),
        (["verify", "job", "--record", "nowhere"], 2, "does not exist"),
        (["aggregator", "start", "--job", "job", "--record", "/proc/kept"], 2, "--record /proc/kept"),
        (["up", "digits", "--record", "/proc/kept"], 2, "--record /proc/kept"),
    ]:
        assert words in refused(*arguments, code=code)
    done = kvps_run("verify", "job", "-q", "--record", ".")
    assert (done.returncode, done.stderr.count("\n"), done.stdout.splitlines()[0]) == (1, 1, chain)
    assert "initial.*.f32 is missing" in done.stderr


def test_a_users_optimizer_and_reduction(lasting: kvps.Store, own_rules: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are used where they are. Elsewhere each command says in one line that they are missing."""
    options = ["--optimizer", "own_rules:Momentum:lr=0.1,mu=0.8", "--reduction", "own_rules:median", *TINY]
    assert kvps_run("up", "digits", "--job", "own", *options, "--shards", "2").returncode == 0
    same = ["--optimizer", "sgd:lr=0.1,momentum=0.8", "--reduction", "median", *TINY]
    assert kvps_run("up", "digits", "--job", "same", *same).returncode == 0
    assert _verified("own")[2].partition(":")[0] == _verified("same")[2].partition(":")[0]
    (own_rules / "elsewhere").mkdir()
    monkeypatch.chdir(own_rules / "elsewhere")
    for command in (["verify", "own"], ["aggregator", "start", "--job", "own", "-q"]):
        done = kvps_run(*command)
        (line,) = done.stderr.splitlines()[-1:]
        assert done.returncode == 2
        assert line.startswith("kvps: error: optimizer 'own_rules:Momentum': there is no module 'own_rules' in ")
    assert "there is no module" in refused("aggregator", "start", "--allow", "own_rules:Momentum")
    assert "--allow is for" in refused("aggregator", "start", "--job", "own", "--allow", "own_rules:Momentum")
