"""What a notebook shows: what IPython is asked to display, which here is not installed."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers.harness import gradient, model

import kvps
from kvps.notebook import is_here, table


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The HTML that a cell has shown, one text for each update."""
    shown: list[str] = []
    python, display = ModuleType("IPython"), ModuleType("IPython.display")
    python.get_ipython = lambda: SimpleNamespace(kernel=object())  # type: ignore[attr-defined]
    display.HTML = str  # type: ignore[attr-defined]
    display.display = lambda html, display_id: SimpleNamespace(update=shown.append)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", python)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    return shown


def test_train_has_a_bar_and_what_it_returns_a_table(server_url: str, cell: list[str]) -> None:
    def step(params: dict[str, Any], rank: int, round_: int) -> Any:
        return 0.5, gradient(params, rank, round_)

    with kvps.local(model(), url=server_url, workers=2) as job:
        weights = job.train(step, rounds=3)
        state = job.state()
    assert cell[-1].startswith('<progress value="6" max="6"></progress> 6 of 6 rounds, loss 0.5000, ')
    assert isinstance(weights, dict)
    shown = weights._repr_html_()  # type: ignore[attr-defined]
    assert "<caption>419 weights</caption>" in shown
    assert "<td>W</td><td>37 x 11</td>" in shown
    assert "<td>scale</td><td>one number</td>" in shown
    members = state._repr_html_()
    assert f"version 3, head {state.head[:12]}" in members
    assert "<td>w1</td><td>finished</td><td>3</td><td>3</td>" in members


def test_outside_of_a_notebook_nothing_is_shown(server_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert not is_here()
    with kvps.local({"x": np.zeros(2, np.float32)}, url=server_url, workers=1) as job:
        job.train(lambda params, rank, round_: params, rounds=2)
    assert capsys.readouterr().out == ""


def test_names_are_no_html() -> None:
    assert "<td>&lt;script&gt;</td>" in table("", ("name",), [("<script>",)])
