"""docs/other-systems.md: each row names the tests that show it, or says why kvps does not do it.

What the page calls an option, a command or a call is given to kvps here, with its value.
"""

from __future__ import annotations

import ast
import inspect
import re
from typing import Any, NamedTuple

import pytest
import typer
from helpers.options import settings_of
from helpers.paths import ROOT, TESTS
from kvps_cli import app
from kvps_cli.train.settings import TaskOptions
from kvps_workers import load_task

import kvps
import kvps.torch
from kvps.config import SPECS, JobConfig
from kvps.config.metadata import METADATA

PAGE = (ROOT / "docs" / "other-systems.md").read_text()
NAMESPACE = {"kvps": kvps, "session": kvps.Session, "job": kvps.Job, "worker": kvps.torch.TorchSession}
PLACEHOLDER = re.compile(r"\b[BHKNQS]\b")


class Row(NamedTuple):
    """A row of a table: what others call it, kvps's way, and the ids of tests below tests/."""

    table: str
    name: str
    way: str
    tests: list[str]

    @property
    def refuses(self) -> bool:
        return re.match(r"(no|not yet): ", self.way) is not None

    @property
    def spans(self) -> list[str]:
        """The code in kvps's way, with a number for each placeholder."""
        return [] if self.refuses else [PLACEHOLDER.sub("2", span) for span in re.findall(r"`([^`]+)`", self.way)]


def _rows() -> list[Row]:
    rows = []
    for title, text in re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL):
        lines = [
            [cell.strip() for cell in line.strip("|\n").split(" |")] for line in text.splitlines() if line[:1] == "|"
        ]
        for cells in lines[2:]:
            assert len(cells) == len(lines[0]), cells
            rows.append(Row(title, cells[0], cells[1], re.findall(r"`([^`]+)`", cells[-1])))
    return rows


ROWS = _rows()
EACH_ROW = pytest.mark.parametrize("row", ROWS, ids=[f"{row.table}-{row.name}" for row in ROWS])


def _settings(span: str) -> tuple[set[str], JobConfig]:
    """The settings that options give, and the job that they make of the digits. Raises InvalidSetting."""
    got = settings_of(TaskOptions, span)
    return set(got.given), got.job_config("digits", load_task("digits"))


def _check_command(span: str) -> None:
    """That kvps has the command, with each of its options."""
    _, *words = span.split()
    command: Any = typer.main.get_command(app)
    while words and hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    known = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in words if word[0] == "-"} <= known, span


def _check_call(span: str) -> None:
    """That what is called takes these arguments, and, if all of them are literals, accepts their values."""
    call = ast.parse(span, mode="eval").body
    assert isinstance(call, ast.Call)
    first, *path = ast.unparse(call.func).split(".")
    called: Any = NAMESPACE[first]
    for name in path:
        called = getattr(called, name)
    is_method = first != "kvps"
    named = {str(keyword.arg): keyword.value for keyword in call.keywords}
    inspect.signature(called).bind(*[None] * is_method, *call.args, **named)
    values = [*call.args, *named.values()]
    if not is_method and not any(isinstance(node, ast.Name) for value in values for node in ast.walk(value)):
        made = called(
            *map(ast.literal_eval, call.args), **{name: ast.literal_eval(node) for name, node in named.items()}
        )
        if isinstance(made, kvps.ParameterGroup):  # which settings there are, an optimizer knows
            kvps.AdamW(groups=[made])


@EACH_ROW
def test_a_row_names_tests_or_a_reason(row: Row) -> None:
    assert bool(row.tests) != row.refuses, f"{row.name}: tests, or a reason that begins with no: or not yet:"
    for test in row.tests:
        path, _, function = test.partition("::")
        assert re.search(rf"^def {function}\(", (TESTS / path).read_text(), re.MULTILINE), f"there is no {test}"


@EACH_ROW
def test_kvps_has_what_a_row_names_and_the_tests_use_it(row: Row) -> None:
    tested = "".join((TESTS / test.partition("::")[0]).read_text() for test in row.tests)
    for span in row.spans:
        if span.startswith("-"):
            given, _ = _settings(span)
            for name in given:
                assert name in tested or (SPECS | METADATA)[name].option[0] in tested, (
                    f"{span}: no test of the row sets {name}"
                )
        elif span.startswith("kvps "):
            _check_command(span)
        elif span.endswith(")"):
            _check_call(span)
