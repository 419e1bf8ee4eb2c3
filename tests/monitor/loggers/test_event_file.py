"""Event files, read back record by record: what TensorBoard will show."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from kvps_monitor.loggers.event_file import EventFile, files_in, free_directory, records
from kvps_monitor.loggers.lineage import Lineage
from kvps_monitor.loggers.rows import Row
from tensorboardX.proto.event_pb2 import Event

from kvps.errors import InvalidSetting

JOB = Lineage("j.00000001", 0, "")
RESTORED = Lineage("j.00000002", 3, "j.00000001")
ANOTHER = Lineage("j.00000003", 0, "")


@pytest.fixture(params=["tensorboardX", "tensorboard"], autouse=True)
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library whose messages are written; what is there is read by tensorboardX."""
    if request.param == "tensorboard":
        pytest.importorskip("tensorboard.summary.writer.record_writer")
        monkeypatch.setitem(sys.modules, "tensorboardX.record_writer", None)


def row(version: int) -> Row:
    return Row(version, 1_500 * version, {"loss": 1 / version, "staleness/w0": version % 2})


def written(directory: Path, *versions: int) -> None:
    file = EventFile(directory, JOB)
    file.write([row(version) for version in versions])
    file.close()


def events(path: Path) -> list[Any]:
    return [Event.FromString(record) for record in records(path.read_bytes())]


def shown(directory: Path) -> list[tuple[int, str, float]]:
    """Return (step, tag, value) of all scalars, in the order of the files' names."""
    paths = sorted((path for path, _ in files_in(directory)), key=lambda path: path.stat().st_mtime_ns)
    each = [event for path in paths for event in events(path)]
    return [(event.step, v.tag, pytest.approx(v.simple_value)) for event in each for v in event.summary.value]


def test_each_figure_is_a_scalar_of_its_version(tmp_path: Path) -> None:
    written(tmp_path, 1, 2)
    assert shown(tmp_path) == [(1, "loss", 1.0), (1, "staleness/w0", 1.0), (2, "loss", 0.5), (2, "staleness/w0", 0.0)]
    ((path, mark),) = files_in(tmp_path)
    assert (mark, path.stat().st_mode & 0o777) == ("j.00000001", 0o600)
    head, *rest = events(path)
    assert head.file_version == "brain.Event:2"
    assert [event.wall_time for event in rest] == [1.5, 3.0]


def test_a_killed_process_leaves_half_a_record_and_the_next_goes_on(tmp_path: Path) -> None:
    written(tmp_path, 1, 2)
    ((path, _),) = files_in(tmp_path)
    whole = path.read_bytes()
    last = len(list(records(whole))[-1]) + 16
    for cut in (1, 5, last - 1, last):
        path.write_bytes(whole[:-cut])
        file = EventFile(tmp_path, JOB)
        assert file.last == 1
        file.close()
    path.write_bytes(whole)
    written(tmp_path, 3)
    assert sorted({step for step, *_ in shown(tmp_path)}) == [1, 2, 3]


def test_what_was_trained_after_a_checkpoint_is_purged(tmp_path: Path) -> None:
    written(tmp_path, 1, 2, 3, 4, 5)
    file = EventFile(tmp_path, RESTORED)
    assert file.last == 3
    file.close()
    (path,) = (path for path, mark in files_in(tmp_path) if mark == "j.00000002")
    (start,) = (event for event in events(path) if event.HasField("session_log"))
    assert (start.session_log.status, start.step) == (start.session_log.START, 4)


def test_the_directory_of_another_job(tmp_path: Path) -> None:
    written(tmp_path / "j", 1)
    with pytest.raises(InvalidSetting, match="rows of another job"):
        EventFile(tmp_path / "j", ANOTHER)
    assert free_directory(tmp_path / "j", JOB) == tmp_path / "j"
    assert free_directory(tmp_path / "j", RESTORED) == tmp_path / "j"
    assert free_directory(tmp_path / "j", ANOTHER) == tmp_path / "j-2"


def test_a_damaged_file_is_said(tmp_path: Path) -> None:
    written(tmp_path, 1)
    ((path, _),) = files_in(tmp_path)
    data = bytearray(path.read_bytes())
    data[12] = 0xFF
    path.write_bytes(data)
    with pytest.raises(InvalidSetting, match="is damaged"):
        EventFile(tmp_path, JOB)
