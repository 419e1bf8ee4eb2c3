"""A job's loggers beside its training: what one of them cannot do ends that one alone."""

from __future__ import annotations

import csv
import logging
import shutil
from pathlib import Path

import pytest
from helpers.harness import aggregating, await_version, gradient, model
from helpers.waiting import eventually
from kvps_monitor.loggers.event_file import EventFile, records
from kvps_monitor.loggers.lineage import Lineage
from kvps_monitor.loggers.targets import Target
from kvps_monitor.loggers.training_log import TrainingLog
from tensorboardX.proto.event_pb2 import Event

from kvps.errors import InvalidSetting
from kvps.job import Job
from kvps.store import Store


def train(job: Job, first: int, last: int) -> None:
    """One worker makes the versions from `first` to `last`, and goes on later."""
    with job.join("w0") as session:
        for version in range(first, last + 1):
            session.push(gradient(session.pull(), 0, version), float(version))
        await_version(job, last)


def versions(path: Path) -> list[int]:
    with path.open(newline="") as file:
        return [int(row["version"]) for row in csv.DictReader(file)]


def test_a_test_is_in_the_row_of_its_version(store: Store, tmp_path: Path) -> None:
    job, path = store.create_job("j", model(), workers=1), tmp_path / "a.csv"
    with aggregating(job), TrainingLog(job, [Target("csv", path)], holds_newest=True) as rows:
        train(job, 1, 3)
        assert eventually(lambda: versions(path) == [1, 2])
        rows.tested(3, {"accuracy": 0.75})
    with path.open(newline="") as file:
        assert [(row["version"], row["test/accuracy"]) for row in csv.DictReader(file)] == [
            ("1", ""),
            ("2", ""),
            ("3", "0.75"),
        ]


def test_one_that_fails_is_one_line_and_the_others_go_on(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job, gone, stays = store.create_job("j", model(), workers=1), tmp_path / "gone", tmp_path / "b.csv"
    gone.mkdir()
    with aggregating(job):
        rows = TrainingLog(job, [Target("csv", gone / "a.csv"), Target("csv", stays)])
        train(job, 1, 2)
        shutil.rmtree(gone)  # its columns cannot be written any more
        with caplog.at_level(logging.ERROR, "kvps"):
            rows.write()
            rows.write()
        train(job, 3, 4)
        with rows:
            pass
    (line,) = rows.failures
    assert line == f"the log csv:{gone}/a.csv ends after version 0: {gone}/a.csv: No such file or directory"
    assert [record.getMessage() for record in caplog.records] == [f"{line}; the training goes on"]
    assert versions(stays) == [1, 2, 3, 4]


def test_a_restored_job_goes_on_in_its_file(store: Store, tmp_path: Path) -> None:
    """What was trained after the checkpoint is lost, and so are its rows; no version has two."""
    job, path = store.create_job("j", model(), workers=1), tmp_path / "a.csv"
    with aggregating(job):
        train(job, 1, 3)
        checkpoint = job.checkpoint()
        train(job, 4, 5)
        with TrainingLog(job, [Target("csv", path)]):
            pass
    store.remove_job("j")
    again = store.restore_job(checkpoint)
    with aggregating(again), TrainingLog(again, [Target("csv", path)]):
        train(again, 4, 7)
    with path.open(newline="") as file:
        found = [(row["version"], row["job"]) for row in csv.DictReader(file)]
    assert found == [(str(n), f"j.{(job if n < 4 else again).id}") for n in range(1, 8)]
    store.remove_job("j")
    fresh, before = store.create_job("j", model(), workers=1), path.read_bytes()
    with pytest.raises(InvalidSetting, match=rf"rows of another job \(j.{again.id}\)"):
        TrainingLog(fresh, [Target("csv", path)])
    assert path.read_bytes() == before


def test_a_job_that_goes_away_ends_the_log(store: Store, tmp_path: Path) -> None:
    job = store.create_job("j", model(), workers=1)
    with TrainingLog(job, [Target("csv", tmp_path / "a.csv")]) as rows:
        store.remove_job("j")
        assert eventually(lambda: rows.ended)
    assert "ends after version 0: no job 'j'" in rows.failures[0]


def test_an_evaluation_is_a_row_behind_that_of_its_version(store: Store, tmp_path: Path) -> None:
    """Once, however often a log is opened; and it does not hide which row was the last. A logger that is opened later
    has all rows too."""
    job, path, board = store.create_job("j", model(), workers=1), tmp_path / "a.csv", tmp_path / "board"
    targets = [Target("csv", path), Target("tensorboard", board)]
    with aggregating(job):
        train(job, 1, 3)
        job.report(2, {"loss": 0.25, "far": float("inf")})
        for first, last in ((4, 5), (6, 6)):
            with TrainingLog(job, targets):
                pass
            train(job, first, last)
            job.report(first, {"loss": 1 / first})
        with TrainingLog(job, [*targets, Target("csv", tmp_path / "late.csv")]):
            pass
    assert sorted(set(versions(tmp_path / "late.csv"))) == [1, 2, 3, 4, 5, 6]
    with path.open(newline="") as file:
        rows = [(int(row["version"]), row["loss"], row["eval/loss"], row["eval/far"]) for row in csv.DictReader(file)]
    assert [version for version, loss, *_ in rows if loss] == [1, 2, 3, 4, 5, 6]
    assert [row for row in rows if not row[1]] == [
        (2, "", "0.25", "inf"),
        (4, "", "0.25", ""),
        (6, "", "0.166666667", ""),
    ]
    events = EventFile(board, Lineage.of(job))
    events.close()
    assert (events.last, events.evaluated) == (6, job.evaluation().at_ms)  # type: ignore[union-attr]
    told = [Event.FromString(record) for each in board.iterdir() for record in records(each.read_bytes())]
    tags = sorted((event.step, v.tag) for event in told for v in event.summary.value if v.tag.startswith("eval/"))
    assert tags == [(2, "eval/far"), (2, "eval/loss"), (4, "eval/loss"), (6, "eval/loss")]
