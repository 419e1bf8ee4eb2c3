"""Several processes compute each contribution of a worker: the same bits as one alone, whichever of them is killed."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.arrays import assert_same_bits
from helpers.commands import KVPS, Started
from helpers.digits_job import digits_job, proved, run_workers, training
from helpers.harness import check_chain
from helpers.waiting import eventually
from kvps_workers import load_task
from kvps_workers.contributions import Contributions
from kvps_workers.helper_processes import HelperProcesses
from kvps_workers.training_loop import train

import kvps
from kvps.arrays.layout import Layout
from kvps.config import JobConfig, Metadata
from kvps.device.base import Device
from kvps.store import Store

pytestmark = pytest.mark.usefixtures("forked")

PARAMS = load_task("digits").parameters(0)
LAYOUT = Layout.of(PARAMS)
ZEROS = {"x": np.zeros(3, np.float32)}


def _config(procs: int = 1, **said: Any) -> JobConfig:
    return JobConfig(**({"batch_size": 50, "epochs": 1} | said), metadata=Metadata(procs, "digits"))


def _helpers_of(home: Path) -> list[int]:
    """Return the helper processes of all that runs with this runtime directory."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            helps = b"kvps_workers.helper_process" in (entry / "cmdline").read_bytes()
            if helps and f"KVPS_RUNTIME_DIR={home}\0".encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return found


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a task in the current directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path / f"of_{tmp_path.name}.py"


TASK = """
import os
from helpers.tasks import Good

class Task(Good):
    def gradient(self, params, batch, xp):
        GRADIENT
"""


def _task(file: Path, gradient: str) -> str:
    file.write_text(TASK.replace("GRADIENT", gradient))
    return f"{file.stem}:Task"


@pytest.mark.parametrize("said", [{"procs": 3}, pytest.param({"procs": 2, "batch_size": 1}, marks=pytest.mark.slow)])
def test_the_bits_are_those_of_one_process_alone(said: dict[str, Any], home: Path) -> None:
    config, task = _config(workers=40, **said), load_task("digits")
    alone = Contributions(config, LAYOUT, task, 7)
    with HelperProcesses(alone) as helpers:
        for number in (0, alone.rounds.total - 1):
            together, expected = helpers.compute(PARAMS, number), alone.compute(PARAMS, number)
            assert together.loss == expected.loss
            assert_same_bits(together.grads, expected.grads)
        assert len(_helpers_of(home)) == config.metadata.procs - 1
    assert _helpers_of(home) == []
    whole = Contributions(_config(workers=40, **said | {"procs": 1}), LAYOUT, task, 7).compute(PARAMS, 0).grads
    first = alone.compute(PARAMS, 0).grads
    for name in PARAMS:
        np.testing.assert_allclose(first[name], whole[name], rtol=0, atol=1e-6)


@pytest.mark.slow
def test_a_helper_that_is_killed_is_started_again(home: Path) -> None:
    alone = Contributions(_config(procs=3), LAYOUT, load_task("digits"), 0)
    with HelperProcesses(alone) as helpers:
        for number in range(4):
            before = _helpers_of(home)
            os.kill(before[number % 2], signal.SIGKILL)
            assert_same_bits(helpers.compute(PARAMS, number).grads, alone.compute(PARAMS, number).grads)
            assert len(set(before) & set(_helpers_of(home))) == 1


def _mine(file: Path) -> Contributions:
    """Those of a worker with one helper, whose task the helper loads only later."""
    name = _task(file, "return 0.0, {'x': params['x'] + 1}")
    config = JobConfig(batch_size=40, epochs=1, metadata=Metadata(2, name))
    return Contributions(config, Layout.of(ZEROS), load_task(name), 0)


def test_a_helper_that_dies_twice_in_a_round_ends_the_worker_in_one_line(mine: Path) -> None:
    contributions = _mine(mine)
    name = _task(mine, "os._exit(3)")
    with HelperProcesses(contributions) as helpers, pytest.raises(kvps.TaskFailed) as caught:
        helpers.compute(ZEROS, 0)
    assert str(caught.value) == f"task '{name}' failed: process 1 of 2 died twice in one round (exit 3)"


def test_what_a_task_raises_in_a_helper_is_said_in_one_line(mine: Path) -> None:
    contributions = _mine(mine)
    for statement, words in (
        ("raise RuntimeError('unlucky')", "RuntimeError: unlucky"),
        ("input()", "EOFError: EOF when reading a line"),
    ):
        name = _task(mine, statement)
        with HelperProcesses(contributions) as helpers:
            for _ in range(2):  # it lives on
                with pytest.raises(kvps.TaskFailed, match=f"^task '{name}' failed: {words}"):
                    helpers.compute(ZEROS, 0)
    mine.unlink()
    with (
        HelperProcesses(contributions) as helpers,
        pytest.raises(kvps.TaskFailed, match=f"^task '{name}': there is no module"),
    ):
        helpers.compute(ZEROS, 0)


@pytest.mark.slow
@pytest.mark.parametrize("said", [{"procs": 2}, {"procs": 2, "staleness": -1, "units": 45}])
def test_what_processes_trained_together_is_computed_again_by_one(store: Store, said: dict[str, Any]) -> None:
    job = digits_job(store, **said)
    run_workers(job, *training(job, "w0", "w1", "w2"))
    assert proved(job).by == "recomputed"
    check_chain(job)


def test_helpers_are_for_the_cpu(store: Store) -> None:
    job = digits_job(store, procs=2)
    with pytest.raises(kvps.InvalidSetting, match="procs=2 is for workers on the CPU"):
        train(job, Device(), "w0")
    assert job.state().members == {}


@pytest.mark.slow
def test_helpers_and_workers_are_killed_and_nothing_is_lost_or_counted_twice(lasting: kvps.Store, home: Path) -> None:
    """A helper that dies twice in one round of its worker fails the task, so each worker goes on in between."""
    options = ["--job", "job", "--procs", "2", "--epochs", "100", "--kill-every", "2", "-w", "2"]
    run = Started([*KVPS, "up", "digits", *options])
    run.until("clock")  # the job is there
    job = lasting.job("job")
    for _ in range(3):
        before = job.state().clock
        assert eventually(lambda b=before: all(job.state().clock.get(w, 0) > b.get(w, 0) + 1 for w in ("w0", "w1")))
        for pid in _helpers_of(home)[:1]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    said, _ = run.process.communicate(timeout=280)
    assert run.process.returncode == 0, said
    assert " 0 lost, 0 twice, replay identical" in said
    assert "process 1 of 2 died (exit -9); starts it again" in said
    assert eventually(lambda: _helpers_of(home) == [])


@pytest.mark.slow
def test_helpers_end_with_a_worker_that_is_killed(store: Store, home: Path) -> None:
    job = store.create_job("digits", PARAMS, task="digits", batch_size=32, epochs=2, procs=3)
    worker = Started([*KVPS, "worker", "--job", job.name, "--redis", store.url])
    assert eventually(lambda: len(_helpers_of(home)) == 2)
    assert worker.end(signal.SIGKILL) == -signal.SIGKILL
    assert eventually(lambda: _helpers_of(home) == [])
