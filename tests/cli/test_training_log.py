"""`--log` and `kvps log --to`: training curves of real jobs. Real processes, a real server, real signals."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
from helpers.commands import TINY, kvps_run, refused
from kvps_monitor.loggers.event_file import files_in, records
from tensorboardX.proto.event_pb2 import Event

import kvps


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def scalars(directory: Path) -> dict[tuple[int, str], float]:
    """Return (step, tag) -> value of all event files of a directory; no scalar may be there twice."""
    out: dict[tuple[int, str], float] = {}
    for path, _ in files_in(directory):
        for event in map(Event.FromString, records(path.read_bytes())):
            for value in event.summary.value:
                assert (event.step, value.tag) not in out
                out[event.step, value.tag] = value.simple_value
    return out


@pytest.mark.slow
def test_up_writes_what_the_log_has(lasting: kvps.Store, tmp_path: Path) -> None:
    done = kvps_run("up", "digits", *TINY, "--log", "csv:a.csv", "--log", "tensorboard")
    assert done.returncode == 0, done.stderr
    assert "training curves: tensorboard --logdir runs/digits" in done.stderr
    found, shown = rows(tmp_path / "a.csv"), scalars(tmp_path / "runs/digits")
    assert [row["version"] for row in found] == [str(commit.version) for commit in lasting.job("digits").log()]
    for row in found:
        assert shown[int(row["version"]), "loss"] == pytest.approx(float(row["loss"]), rel=1e-6)
    accuracy = next(line.split()[-1] for line in done.stdout.splitlines() if line.startswith("test accuracy"))
    assert f"{float(found[-1]['test/accuracy']):.4f}" == accuracy
    assert [row["test/accuracy"] for row in found[:-1]] == [""] * (len(found) - 1)


@pytest.mark.slow
def test_what_cannot_be_logged_is_said_before_anything_starts(home: Path, tmp_path: Path) -> None:
    (tmp_path / "old.csv").write_text("version,job,at_ms\n")
    wrong = [["up", "--log", text, "digits"] for text in ("xml:a", "csv:", "csv:none/a.csv", "tensorboard:old.csv")]
    for command in (*wrong, ["run", "--log", "csv:old.csv", "--", "true"]):
        refused(*command)
    assert refused("up", "digits", "--log", "csv:a.csv", "--log", "csv:a.csv") == "--log csv:a.csv was given twice"
    line = refused("aggregator", "start", "--log", "csv:a.csv")
    assert line == "--log is for one job: give its name with --job"


@pytest.mark.slow
def test_a_job_that_others_run(lasting: kvps.Store, tmp_path: Path, start: Any) -> None:
    """`kvps log --to` beside it, and again after its end: the same rows."""
    running = start("up", "digits", "--epochs", "8", "--job", "j")
    running.until("version")
    follows = start("log", "j", "--to", "csv:a.csv", "--follow")
    assert follows.wait() == 0
    assert running.wait() == 0
    whole = (tmp_path / "a.csv").read_bytes()
    for _ in range(2):
        assert kvps_run("log", "j", "--to", "csv:a.csv", "--to", "csv:b.csv").returncode == 0
    found = rows(tmp_path / "b.csv")
    assert [row["version"] for row in found] == [str(n) for n in range(1, lasting.job("j").state().version + 1)]
    assert (tmp_path / "a.csv").read_bytes() == whole == (tmp_path / "b.csv").read_bytes()
