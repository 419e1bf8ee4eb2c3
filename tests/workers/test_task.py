"""A user's task may do anything: each mistake is one line that names the task, and nothing is lost by it."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers.commands import kvps_run, refused
from helpers.tasks import Good
from kvps_workers.task import CheckedTask, load_task

import kvps
from kvps.errors import InvalidTask, TaskFailed

X = np.ones((6, 2), np.float32)


def _with(**changes: Any) -> CheckedTask:
    return CheckedTask("mine:Task", type("Task", (Good,), changes)())


def _call(task: CheckedTask, method: str) -> Any:
    arguments = {"parameters": (0,), "data": (1, 3, np), "gradient": ({"x": X}, (X,), np), "evaluate": ({}, np)}
    return getattr(task, method)(*arguments[method])


def _fails(*_: object) -> None:
    raise RuntimeError("unlucky")


@pytest.mark.parametrize("method", ["parameters", "data", "gradient", "evaluate"])
def test_what_a_task_raises_is_said_in_one_line(method: str) -> None:
    with pytest.raises(TaskFailed, match=r"^task 'mine:Task' failed: RuntimeError: unlucky \(test_task.py, line \d"):
        _call(_with(**{method: _fails}), method)


@pytest.mark.parametrize(
    ("method", "returned", "words"),
    [
        ("parameters", None, "parameters must return name -> array, not None"),
        ("data", None, "data must return a tuple of arrays, not None"),
        ("data", X, "not ndarray of shape (6, 2)"),
        ("data", (), "not a tuple of nothing"),
        ("data", (X, X[:5]), "data(1, 3) must return arrays of equal length, not [6, 5]"),
        ("data", (X[:0], X[:0]), "data(1, 3) returned no samples"),
        ("data", (np.float32(1),), "TypeError"),
        ("gradient", None, "gradient must return (loss, name -> gradient), not None"),
        ("gradient", {"x": X}, "not a dict with 'x'"),
        ("gradient", (0.0, {}, 1), "not a tuple of float, dict, int"),
        ("gradient", (None, {}), "the loss that gradient returned must be one number, not None"),
        ("evaluate", None, 'evaluate must return {"loss": ...}, not None'),
        ("evaluate", {"accuracy": 1.0}, "not a dict with 'accuracy'"),
        ("evaluate", {"loss": 1.0, "accuracy": "high"}, "the accuracy that evaluate returned"),
        ("evaluate", {"loss": 1.0, 3: 1.0}, "evaluate must name its figures in text, not 3"),
        ("evaluate", {"loss": 1.0, "f1": True}, "the f1 that evaluate returned must be one number, not bool"),
    ],
)
def test_what_a_task_must_not_return(method: str, returned: object, words: str) -> None:
    with pytest.raises(TaskFailed) as caught:
        _call(_with(**{method: lambda *_: returned}), method)
    assert str(caught.value).startswith("task 'mine:Task' failed: ")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


class _Scalar:
    """What a framework's tensor of one item is to kvps."""

    def item(self) -> float:
        return 0.5


@pytest.mark.parametrize("loss", [0.5, np.float32(0.5), np.array([0.5], np.float32), np.array(0.5), _Scalar()])
def test_a_loss_may_be_any_one_number(loss: object) -> None:
    task = _with(gradient=lambda *_: (loss, {}), evaluate=lambda *_: {"f1": loss, "loss": loss, "accuracy": loss})
    found, _ = _call(task, "gradient")
    assert (type(found), found) == (float, 0.5)
    assert json.dumps(_call(task, "evaluate")) == '{"f1": 0.5, "loss": 0.5, "accuracy": 0.5}'


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        *((name, value) for name in ("batch_size", "epochs") for value in (0, -1, 2.0, "8", None, True)),
        *(("lr", value) for value in ("fast", None, -0.1, float("nan"), float("inf"), np.float32(0.1), True)),
    ],
)
def test_what_a_task_must_not_want(setting: str, value: object) -> None:
    with pytest.raises(InvalidTask, match=f"^task 'mine:Task': {setting} must be .*, not "):
        _with(**{setting: value})


def test_a_class_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "made.py").write_text(
        "class Broken:\n    def __init__(self):\n        raise RuntimeError('unlucky')\n\n"
        "class Bare:\n    def __init__(self):\n        raise ImportError('pip install it')\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(TaskFailed, match=r"RuntimeError: unlucky \(made.py, line 3"):
        load_task("made:Broken")
    with pytest.raises(InvalidTask, match=r"^task 'made:Bare': pip install it$"):
        load_task("made:Bare")


# -- the same, as a user of the command line meets it --------------------------------------------------------------

MINE = """
import os

import numpy as np

X = np.ones((6, 2), np.float32)

class Good:
    batch_size, epochs, lr = 3, 2, 0.5

    def parameters(self, seed):
        return {"x": np.zeros(3, np.float32)}

    def data(self, rank, workers, xp):
        return (X,)

    def gradient(self, params, batch, xp):
        return np.float32(0.5), {"x": params["x"] - 1}

    def evaluate(self, params, xp):
        return {"loss": np.float32(0.25), "accuracy": np.array([0.5])}

class Rich(Good):
    def gradient(self, params, batch, xp):
        for _ in range(4):
            os.write(1, b"\\xff" * 50_000 + b"\\n")
        return super().gradient(params, batch, xp)

    def evaluate(self, params, xp):
        return {"f1": 0.75, "loss": 0.25, "perplexity": np.float32(12345.5), "accuracy": 0.5, "rare": 1.5e-7,
                "diverged": np.nan}

class NoData(Good):
    def data(self, rank, workers, xp):
        return X[:0] if rank else X,

class Untested(Good):
    def evaluate(self, params, xp):
        return {}

class AllFail(Good):
    def gradient(self, params, batch, xp):
        raise RuntimeError("unlucky")

class FailsLater(Good):
    calls = 0

    def gradient(self, params, batch, xp):
        self.calls += 1
        if self.calls > 1:
            raise RuntimeError("unlucky")
        return super().gradient(params, batch, xp)
"""


@pytest.fixture
def mine(home: Path, tmp_path: Path) -> Iterator[Any]:
    """Runs a command where `mine.py` is, beside a server that outlives it."""
    (tmp_path / "mine.py").write_text(MINE)

    assert kvps_run("server", "start").returncode == 0
    try:
        with kvps.connect(f"unix://{home}/redis.sock") as store:
            yield SimpleNamespace(run=kvps_run, store=store, folder=tmp_path)
    finally:
        kvps_run("server", "stop", "--yes")


@pytest.mark.slow
def test_nothing_is_begun_with_a_task_that_cannot_be_trained(mine: Any) -> None:
    assert "data(1, 2) returned no samples" in refused(
        "up", "mine:NoData", "--workers", "2", "--data", "static", code=1
    )
    assert mine.store.jobs() == []


@pytest.mark.slow
def test_all_figures_of_a_task_are_shown_and_reported_in_its_order(mine: Any) -> None:
    """The task also prints what is no text."""
    done = mine.run("up", "mine:Rich", "-w", "2", "--epochs", "1", "--data", "static", "--report", "r.json")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("w0: \N{REPLACEMENT CHARACTER}") == 8
    shown = done.stdout.splitlines()[-6:]
    assert shown[0].endswith("test loss 0.2500")
    assert shown[1:] == [
        "test f1 0.75",
        "test perplexity 12345.5",
        "test accuracy 0.5000",
        "test rare 1.5e-07",
        "test diverged nan",
    ]

    def no_json(constant: str) -> None:
        raise AssertionError(constant)

    report = json.loads((mine.folder / "r.json").read_text(), parse_constant=no_json)
    figures = {"f1": 0.75, "loss": 0.25, "perplexity": 12345.5, "accuracy": 0.5, "rare": 1.5e-7, "diverged": None}
    assert list(report["figures"].items()) == list(figures.items())
    assert (report["loss"], report["accuracy"]) == (0.25, 0.5)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("mine.py:Good", "say mine:Good"),
        ("/tmp/tasks/mine.py:Good", "change to /tmp/tasks and say mine:Good"),
        ("mine.py", "say mine:NAME, with the name of its class"),
        ("mine.Good", "say mine:Good"),
        ("digit", "did you mean digits?"),
        ("some thing", "is unknown: built in are digits"),
    ],
)
def test_a_name_that_is_nearly_a_tasks(name: str, words: str) -> None:
    with pytest.raises(InvalidTask) as caught:
        load_task(name)
    assert str(caught.value).startswith(f"task {name!r} ")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_attribute_that_is_nearly_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nearly.py").write_text("class Line:\n    pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InvalidTask, match=r"nearly.py has no 'line'; did you mean Line\?$"):
        load_task("nearly:line")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "said", "version", "shown"),
    [
        ("Untested", "task 'mine:Untested' failed: evaluate must return", 2, "4 contributions in 2 versions, "),
        ("AllFail", "job AllFail: all its workers failed before anything was committed: there are no figures", 0, ""),
        ("FailsLater", "job FailsLater: all its workers failed; the figures", 1, "test accuracy 0.5"),
    ],
)
def test_a_run_that_fails_shows_what_was_trained(mine: Any, task: str, said: str, version: int, shown: str) -> None:
    (mine.folder / "r.json").write_text("of an earlier run")
    done = mine.run("up", f"mine:{task}", "--workers", "2", "--report", "r.json")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"kvps: error: {said}")
    assert "Traceback" not in done.stderr
    figures = [line for line in done.stdout.splitlines() if line.startswith(("test ", "0 contributions", "4 contrib"))]
    assert [line[: len(shown)] for line in figures[-1:]] == [shown][: len(figures)]
    assert bool(figures) == bool(shown)
    report = json.loads((mine.folder / "r.json").read_text())
    assert (report["version"], report["loss"] is None) == (version, task != "FailsLater")
    assert (report["weights_sha256"] is None) == (version == 0)


@pytest.mark.slow
def test_a_job_without_rounds_has_no_figures_either(mine: Any) -> None:
    (mine.folder / "train.py").write_text(
        "import kvps, numpy as np\n"
        "with kvps.from_env() as worker:\n"
        "    job = worker.create_job({'x': np.zeros(3, np.float32)})\n"
        "    job.join(worker.id).leave()\n"
    )
    done = mine.run("run", "-w", "2", "--", sys.executable, "train.py")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "kvps: error: job train: nothing was committed: there are no figures"
    assert "contributions in" not in done.stdout + done.stderr


@pytest.mark.slow
def test_whether_the_report_can_be_written_is_found_out_first(mine: Any) -> None:
    (mine.folder / "folder").mkdir()
    (mine.folder / "locked").write_text("mine")
    (mine.folder / "locked").chmod(0o400)
    for report, words in [("folder", "is a directory"), ("locked", "cannot be written"), ("no/r.json", "no directory")]:
        if report == "locked" and os.access(mine.folder / report, os.W_OK):
            continue  # nothing is closed to root
        assert words in refused("up", "mine:Good", "--report", report)
    assert mine.store.jobs() == []


@pytest.mark.slow
def test_the_digits_are_those_of_scikit_learn() -> None:
    from kvps_workers import digits
    from sklearn.datasets import load_digits

    for ours, theirs in zip(digits._load(), load_digits(return_X_y=True), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_module_of_a_directory_with_a_longer_name_is_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The beginning of a path does not say where a module lies."""
    for folder in ("project", "project-of-another"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine_here.py").write_text("Line = 5")
    monkeypatch.syspath_prepend(str(tmp_path / "project-of-another"))
    importlib.import_module("mine_here")
    monkeypatch.chdir(tmp_path / "project")
    try:
        with pytest.raises(kvps.InvalidTask, match="is loaded already from elsewhere"):
            load_task("mine_here:Line")
    finally:
        del sys.modules["mine_here"]
