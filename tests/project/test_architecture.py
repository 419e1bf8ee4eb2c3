"""docs/ARCHITECTURE.md holds against the code: real calls take its paths, and its tree has every room."""

from __future__ import annotations

import importlib
import re
import sys
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
from helpers.harness import aggregating, large_model
from helpers.paths import ROOT

import kvps

PAGE = (ROOT / "docs" / "ARCHITECTURE.md").read_text()
PATHS = {
    title: re.findall(r"^\d+\. `([\w.]+)`", text, re.MULTILINE)
    for title, text in re.findall(r"^### ([^\n]+)\n(.*?)(?=^##)", PAGE, re.MULTILINE | re.DOTALL)
}
PARAMS = large_model()  # of several chunks


class Trace:
    """The order in which each thread first called each function of kvps while it was `on`."""

    def __init__(self) -> None:
        self.on = False
        self._calls: dict[int, dict[str, int]] = {}

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        module = frame.f_globals.get("__name__", "")
        if self.on and event == "call" and module.startswith("kvps"):
            calls = self._calls.setdefault(threading.get_ident(), {})
            calls.setdefault(f"{module}.{frame.f_code.co_qualname}", len(calls))

    def check(self, steps: list[str]) -> None:
        """Assert that this thread called the worker's steps, and another one the aggregator's, in their order."""
        here = next((n for n, step in enumerate(steps) if step.startswith("kvps_aggregator")), len(steps))
        mine = self._calls.pop(threading.get_ident())
        assert _in_order(steps[:here], mine) == steps[:here]
        assert any(_in_order(steps[here:], calls) == steps[here:] for calls in self._calls.values()) or not steps[here:]


def _in_order(steps: list[str], calls: dict[str, int]) -> list[str]:
    return sorted((step for step in steps if step in calls), key=calls.__getitem__)


@pytest.fixture
def trace() -> Iterator[Trace]:
    """A trace of this thread and of those that the test starts."""
    trace = Trace()
    before = sys.getprofile()
    threading.setprofile(trace)
    sys.setprofile(trace)
    try:
        yield trace
    finally:
        sys.setprofile(before)
        threading.setprofile(None)  # type: ignore[arg-type]


@contextmanager
def recording(trace: Trace) -> Iterator[None]:
    trace.on = True
    yield
    trace.on = False


def test_a_push_takes_its_path_until_it_is_committed(store: kvps.Store, trace: Trace) -> None:
    job = store.create_job("job", PARAMS, workers=1, transport="redis")
    with aggregating(job), job.join("w0") as session:
        session.pull()
        session.push(PARAMS)
        session.pull()
        with recording(trace):
            session.push(PARAMS)
            session.pull()
    trace.check(PATHS["A push, until it is committed"])


def test_a_commit_takes_its_path_until_it_is_pulled(store: kvps.Store, trace: Trace) -> None:
    job = store.create_job("job", PARAMS, workers=1, transport="redis")
    with aggregating(job), job.join("w0") as session:
        session.pull()
        session.push(PARAMS)
        with recording(trace):
            session.pull()
    trace.check(PATHS["A commit, until it is pulled"])


def test_a_setting_takes_its_path_until_its_script(store: kvps.Store, trace: Trace) -> None:
    steps = PATHS["`--staleness`, until `plan.lua`"]
    with recording(trace):
        store.create_job("job", PARAMS, staleness=1)
    trace.check(steps[-2:])


def test_a_gradient_of_pytorch_takes_its_path_until_the_socket(store: kvps.Store, trace: Trace) -> None:
    torch = pytest.importorskip("torch")
    import kvps.torch

    model = torch.nn.Linear(1000, 600)  # two chunks
    job = store.create_job("job", kvps.torch.parameters(model), workers=1, transport="redis")
    with aggregating(job), kvps.torch.join(job, model) as session:
        session.pull()
        model(torch.ones(3, 1000)).sum().backward()
        with recording(trace):
            session.step()
    trace.check(PATHS["A PyTorch gradient, until the socket"])


def _named(name: str) -> Any:
    """Return what a dotted name means."""
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        try:
            named: Any = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            named = getattr(named, part)
        return named
    raise AssertionError(name)


@pytest.mark.parametrize("title", PATHS)
def test_a_path_is_of_functions(title: str) -> None:
    if "PyTorch" in title:
        pytest.importorskip("torch")
    assert len(PATHS[title]) > 3
    assert all(callable(_named(name)) for name in PATHS[title])


def test_the_tree_has_every_room() -> None:
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    for package in build["targets"]["wheel"]["packages"]:
        tree = re.search(rf"^{package}/.*?(?=^\S)", PAGE, re.MULTILINE | re.DOTALL)
        assert tree, f"{package} is not in the tree"
        for room in (ROOT / package).iterdir():
            if (room / "__init__.py").exists():
                assert re.search(rf"\b{room.name}/", tree[0]), f"{room} is not in the tree"
