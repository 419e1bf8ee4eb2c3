"""`kvps simulate`: what it prints and writes, and what it refuses in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kvps_cli import app
from typer.testing import CliRunner

from kvps.errors import InvalidSetting

FEW = ["simulate", "--workers", "3", "--size", "4MB", "--rounds", "4"]


def run(*arguments: str) -> str:
    done = CliRunner().invoke(app, [*FEW, *arguments], catch_exceptions=False, standalone_mode=False)
    assert not done.exception, done.exception
    return done.stdout


def test_it_prints_facts_or_json() -> None:
    shown = run()
    assert "busiest" in shown
    assert "contributions a second" in shown
    found = json.loads(run("--json", "--topology", "beside", "--slow", "0.1=3x"))
    assert found["setting"]["slow_by"] == 3
    assert 0 < found["median_s"] <= found["p95_s"]
    assert found["bottleneck"] in found["busy"]


def test_the_same_seed_prints_the_same(tmp_path: Path) -> None:
    same = [run("--jitter", "0.5", "--seed", seed) for seed in "112"]
    assert same[0] == same[1] != same[2]


@pytest.mark.slow
def test_it_writes_a_page_and_a_picture(tmp_path: Path) -> None:
    for name, begins in {"page.html": "<!doctype html>", "picture.svg": "<svg"}.items():
        run("-o", str(tmp_path / name), "--rounds", "1")
        assert (tmp_path / name).read_text().startswith(begins)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--size", ""], "--size must be"),
        (["--bandwidth", "25GB"], "--bandwidth is in bits"),
        (["--compute", "fast"], "--compute must be a time"),
        (["--slow", "0.1"], "--slow must be PART=Nx"),
        (["-o", "page.pdf"], "--out must end in .html or .svg"),
        (["-o", "/nowhere/page.html"], "--out /nowhere/page.html: there is no directory /nowhere"),
        (["--constants", "/none"], "--constants /none: No such file"),
    ],
)
def test_bad_options_are_refused(arguments: list[str], words: str) -> None:
    done = CliRunner().invoke(app, [*FEW, *arguments], standalone_mode=False)
    assert isinstance(done.exception, InvalidSetting)
    assert words in str(done.exception)
