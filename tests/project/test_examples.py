"""The Python in README and docs is run as it stands there, and so are the examples."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import kvps_aggregator
import numpy as np
import pytest
import torch
from helpers.commands import TINY, kvps_run
from helpers.harness import check_chain, newest_losses
from helpers.pages import python_in
from helpers.paths import ROOT
from helpers.servers import free_port
from helpers.waiting import awaited_job

import kvps
import kvps.torch
from kvps.job import Job
from kvps.store import Store

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked")]  # each starts whole commands


def test_the_rows_of_a_worker() -> None:
    namespace: dict[str, Any] = {}
    exec(python_in("docs/data-and-groups.md")[0], namespace)
    assert len(namespace["rows"]) == 15_000


def test_batches_of_numpy_arrays(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvps, "connect", lambda: store)
    with ThreadPoolExecutor(1) as pool:
        served = pool.submit(lambda: kvps_aggregator.serve(awaited_job(store, "line")))
        shown: dict[str, Any] = {}
        exec(python_in("docs/data-and-groups.md")[1], shown)
        served.result()
    assert shown["job"].state().version == 40
    assert abs(float(shown["job"].snapshot()[1]["a"][0]) - 3) < 0.1


def test_a_worker_of_a_part(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvps, "connect", lambda: store)
    shown: dict[str, Any] = {}
    exec(python_in("docs/data-and-groups.md")[2], shown)
    assert list(shown["gradient"]) == ["head.w"]
    assert [c.part for c in shown["job"].access.reader.inbox()] == ["head"]


def test_a_process_group_as_one_worker(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop of a member, whose group is this process alone."""
    environment = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    model = torch.nn.Linear(4, 2)
    job = store.create_job("job", kvps.torch.parameters(model))
    batch = torch.ones(3, 4), torch.zeros(3, dtype=torch.long)
    served = threading.Thread(target=kvps_aggregator.serve, args=(job,))
    served.start()
    try:
        exec(
            python_in("docs/data-and-groups.md")[3],
            {"kvps": kvps, "torch": torch, "job": job, "model": model, "batch_of": lambda round_, rank: batch},
        )
    finally:
        torch.distributed.destroy_process_group()
    served.join(120)
    assert job.state().clock == {"w0": 100}


def test_the_readmes_five_lines(lasting: Store) -> None:
    start = {"x": np.zeros(3, np.float32)}
    job = lasting.create_job("mine", start, reduction="sum", optimizer=kvps.SGD(lr=1.0))
    thread = threading.Thread(target=kvps_aggregator.serve, args=(job,))
    thread.start()
    code, _, _ = python_in("README.md")
    exec(code, {"batches": range(4), "gradient": lambda params, batch: {"x": np.ones(3, np.float32)}})
    thread.join(120)
    np.testing.assert_array_equal(job.snapshot()[1]["x"], [-4, -4, -4])


def test_the_readmes_notebook(home: Path) -> None:
    _, _, code = python_in("README.md")
    found = {
        "params": {"x": np.zeros(3, np.float32)},
        "gradient": lambda params, rank, round_: {"x": params["x"] - rank},
    }
    exec(code, {"kvps": kvps} | found)


def test_the_learner_and_the_actor_of_the_page(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, experience = python_in("docs/actors.md")
    exec(code, {})
    actor, learner = capsys.readouterr().out.splitlines()
    assert actor.startswith("actor: version 20, the same bits: True, Traffic(differences=")
    assert "repairs=0" in actor
    assert learner == "learner: version 20"
    exec(experience, {})
    assert capsys.readouterr().out == "[0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]\n"


def test_the_scripts_of_the_page_of_scripts(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script, *_, notebook = python_in("docs/run.md")
    (tmp_path / "train.py").write_text(script)
    done = kvps_run("run", "-w", "3", "--", sys.executable, "train.py", "--rounds", "500")
    assert done.returncode == 0, done.stdout + done.stderr
    page = (ROOT / "docs/run.md").read_text()
    assert done.stdout == "w0: version 500: y = 3.00 x + 2.00\n"
    assert "\n1,500 contributions in 500 versions, " in done.stderr
    for shown in (done.stdout, "\n1,500 contributions in 500 versions, "):
        assert shown in page
    exec(notebook, {})
    assert capsys.readouterr().out.count(": 50") == 3


def test_the_smallest_loop(home: Path) -> None:
    command = [sys.executable, str(ROOT / "examples" / "numpy_loop.py")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout == "version 100: y = 3.000 x + 2.000\n", done.stderr


@pytest.mark.parametrize(
    ("example", "words", "least", "most"),
    [
        ("train_under_run.py", "test accuracy ", 0.95, 1.0),
        ("cupy_mlp.py", "w0: cpu: test accuracy ", 0.95, 1.0),
        ("gpt.py", "w0: BSP: loss ", 0.0, 2.6),  # ln 128 = 4.85 at first
    ],
)
def test_an_example_under_run(home: Path, example: str, words: str, least: float, most: float) -> None:
    done = kvps_run("run", "-w", "2", "--", sys.executable, str(ROOT / "examples" / example))
    assert done.returncode == 0, done.stdout + done.stderr
    assert least <= float(done.stdout.rpartition(words)[2].split()[0]) <= most


def test_the_task_of_the_tasks_page(home: Path, tmp_path: Path) -> None:
    (code,) = python_in("docs/tasks.md")
    (tmp_path / "mine.py").write_text(code)
    done = kvps_run("up", "mine:Line")
    assert done.returncode == 0, done.stderr
    assert "test loss 0.00" in done.stdout


def test_the_lag_of_the_modes_page(lasting: Store, capsys: pytest.CaptureFixture[str]) -> None:
    assert kvps_run("up", "digits", "--data", "static", "-s", "1", "--slow", "w0=5x", *TINY).returncode == 0
    _, code = python_in("docs/modes.md")
    exec(code, {})
    assert capsys.readouterr().out == "largest lag in rounds: 1\n"


def test_the_loops_of_the_torch_page_and_the_readme(lasting: Store) -> None:
    _, _, _, create, loop, ranks, _, recipe, _, _, _, scheduled = python_in("docs/torch.md")
    exec(create, names := {})
    batches = [(x := torch.randn(16, 20), x[:, :5].argmax(1)) for _ in range(30)]
    names |= {"batches": batches, "loss_of": torch.nn.functional.cross_entropy}
    _train_both(names, loop, loop)
    assert names["job"].state().units_done == 3 * 16
    by_rank = ranks[ranks.index("with ") :]
    exec(ranks.removesuffix(by_rank), names)
    _train_both(names, by_rank, by_rank.replace("w0", "w1"))
    assert names["job"].state().clock == {"w0": 30, "w1": 30}
    exec(recipe, names)
    optimizer = names["job"].config.optimizer
    assert (optimizer.clip_norm, optimizer.lr_at(0), optimizer.lr_at(100)) == (1.0, 3e-5, 3e-3)
    assert optimizer.of_each(["0.bias"])[0].weight_decay == 0
    _train_both(names, by_rank, by_rank.replace("w0", "w1"))
    assert newest_losses(names["job"])["w1"] < 1.5  # ln 5 at first
    exec(scheduled, names)
    assert names["optimizer"].lr_at(50) == 0.05
    names["store"].close()


def test_the_optimizer_of_the_torch_page_and_the_readme(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, *_ = python_in("docs/torch.md")
    (tmp_path / "train.py").write_text(script)
    done = kvps_run("run", "-w", "2", "--", sys.executable, "train.py")
    assert done.returncode == 0, done.stdout + done.stderr
    loss, versions = done.stdout.removeprefix("w0: loss ").split(", in ")
    assert (float(loss) < 0.8, versions) == (True, "50 versions\n")
    _, readmes, _ = python_in("README.md")
    model = torch.nn.Linear(20, 5)
    batches = [(x := torch.randn(16, 20), x[:, :5].argmax(1)) for _ in range(30)]
    names = {"model": model, "sgd": torch.optim.SGD(model.parameters(), lr=0.5), "batches": batches}
    exec(readmes, names | {"kvps": kvps, "loss_of": torch.nn.functional.cross_entropy})
    assert torch.nn.functional.cross_entropy(model(batches[0][0]), batches[0][1]) < 1.0  # ln 5 at first


def _train_both(names: dict[str, Any], first: str, second: str) -> None:
    """Run two loops as two workers, each with a model of its own."""
    w1 = {**names, "model": torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 5))}
    with ThreadPoolExecutor(3) as pool:
        ends = [pool.submit(kvps_aggregator.serve, names["job"])]
        ends += [pool.submit(exec, first, names), pool.submit(exec, second, w1)]
        for end in ends:
            end.result(120)


def test_the_groups_and_the_warm_up_of_the_optimizers_page() -> None:
    groups, _, warm_up = python_in("docs/optimizers.md")
    exec(groups, names := {})
    bias, head, weight = names["optimizer"].of_each(["norm.bias", "head.weight", "body.weight"])
    assert (bias.weight_decay, head.lr, weight.weight_decay) == (0.0, 1e-3, 0.1)
    exec(warm_up, names)
    assert names["optimizer"].lr_at(100) == 3e-4


def test_the_momentum_of_the_optimizers_page(home: Path, tmp_path: Path) -> None:
    _, own, _ = python_in("docs/optimizers.md")
    (tmp_path / "rules.py").write_text(own)
    done = kvps_run("up", "digits", "--optimizer", "rules:Momentum:lr=0.1,mu=0.8", *TINY)
    assert done.returncode == 0, done.stderr


def test_torch_digits_under_run(lasting: Store, start: Any) -> None:
    """One copy is killed in the middle; the others do its batch, and each counts once."""
    script = str(ROOT / "examples" / "torch_digits.py")
    running = start("run", "-w", "3", "--job", "torch", "--staleness", "2", "--", sys.executable, script)
    job = awaited_job(lasting, "torch", 51)
    os.kill(job.state().members["w1"].pid, signal.SIGKILL)
    shown = running.until("test accuracy ").splitlines()[-1]
    assert running.wait() == 0
    assert shown.startswith("w0: SSP(2): test accuracy ")
    assert float(shown.split()[-1]) > 0.95
    used = [c.unit for commit in job.log() for c in commit.plan.contributions]
    assert sorted(used) == list(range(14 * 45))
    check_chain(job)


def test_submit_from_python_says_what_it_needs_and_ends_on_ctrl_c_in_one_line(home: Path) -> None:
    example = [sys.executable, "-u", "-P", str(ROOT / "examples" / "submit_from_python.py")]
    with subprocess.Popen(example, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        assert program.stdout
        assert program.stdout.readline() == "submitted from-python; hosts at the queue: 0\n"
        needs = "it needs hosts (kvps worker --queue) and an aggregator (kvps aggregator start)\n"
        assert program.stdout.readline() == needs
        program.send_signal(signal.SIGINT)
        rest, errors = program.communicate(timeout=120)
    assert (rest, errors, program.returncode) == ("", "interrupted: from-python is cancelled\n", 1)


def test_submit_from_python(lasting: Store, start: Any) -> None:
    beside = [start("aggregator", "start"), start("worker", "--queue"), start("worker", "--queue")]
    done = subprocess.run(
        [sys.executable, "-P", str(ROOT / "examples" / "submit_from_python.py")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) > 0.9
    for other in beside:
        assert other.end() == 128 + signal.SIGTERM


def test_the_loop_of_the_page_of_local_steps(lasting: Store) -> None:
    creating, joining, shared, sharing = python_in("docs/local-training.md")
    x = torch.randn(8, 20)
    there: dict[str, Any] = {"batches": [(x, x[:, :5].argmax(1))] * 120}
    there["dataset"] = [(row, row[:5].argmax()) for row in torch.randn(2_000, 20)]

    def trained(creating: str, joining: str) -> Job:
        exec(creating.replace("workers=4", "workers=1"), there)
        thread = threading.Thread(target=kvps_aggregator.serve, args=(there["job"],))
        thread.start()
        exec(joining, there)
        thread.join(120)
        return there["job"]  # type: ignore[no-any-return]

    assert check_chain(trained(creating, joining)) == 3, "50 steps, 50, and the 20 that were left"
    weights = [c.weight for commit in trained(shared, sharing).log() for c in commit.plan.contributions]
    assert (len(weights), sum(weights)) == (4, 6_000)
