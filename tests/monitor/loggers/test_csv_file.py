"""A CSV file of rows: whoever opens it again goes on after its last whole line, and never in another job's rows."""

from __future__ import annotations

import csv
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from kvps_monitor.loggers.csv_file import CsvFile
from kvps_monitor.loggers.lineage import Lineage
from kvps_monitor.loggers.rows import Row
from kvps_monitor.loggers.targets import Target

from kvps.errors import InvalidSetting, KvpsError

JOB = Lineage("j.00000001", 0, "")


def row(version: int, **values: float) -> Row:
    return Row(version, 1_000 * version, {"loss": 1 / version, **values})


def written(path: Path, *rows: Row) -> None:
    file = CsvFile(path, JOB)
    file.write(rows)
    file.close()


def found(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_half_a_line_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    written(path, row(1), row(2))
    whole = path.read_bytes()
    for cut in range(1, len(whole)):
        path.write_bytes(whole[:-cut])
        file = CsvFile(path, JOB)
        last = file.last
        file.write([row(version) for version in range(last + 1, 3)])
        file.close()
        assert path.read_bytes() == whole, cut


def test_a_new_figure_is_a_new_column(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    written(path, row(1), row(2))
    written(path, row(3, accuracy=0.5), row(4))
    assert [each["accuracy"] for each in found(path)] == ["", "", "0.5", ""]
    assert [(each["version"], each["loss"]) for each in found(path)][1:3] == [("2", "0.5"), ("3", "0.333333333")]
    assert [each.name for each in tmp_path.iterdir()] == ["a.csv"]
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("text", ["a,b\n1,2\n", "version,job,at_ms\n\xff\n", "\xff\xfe\n", "versions"])
def test_another_file_is_refused_and_stays(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(InvalidSetting, match=r"is no log of kvps|is damaged"):
        CsvFile(path, JOB)
    assert path.read_bytes() == text.encode("latin-1")


@pytest.mark.parametrize("line", ["", "garbage", "9" * 5000 + ",j.00000001,5,1"])
def test_a_damaged_line_is_named_and_stays(tmp_path: Path, line: str) -> None:
    path = tmp_path / "a.csv"
    written(path, row(1), row(2))
    path.write_text(before := f"{path.read_text()}{line}\n")
    with pytest.raises(InvalidSetting, match=r"a\.csv is damaged: .* is no row of a log"):
        CsvFile(path, JOB)
    assert path.read_text() == before


def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    """A pipe has no end to go on after, and /dev/full has more bytes than memory."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/full")):
        with pytest.raises(InvalidSetting, match="is no regular file: name a file"):
            CsvFile(path, JOB)
        with pytest.raises(InvalidSetting, match=f"^csv:{path} is no regular file: name a file"):
            Target.parse(f"csv:{path}").check()


def test_one_process_writes_it(tmp_path: Path) -> None:
    file = CsvFile(tmp_path / "a.csv", JOB)
    with pytest.raises(InvalidSetting, match="another process writes it"):
        CsvFile(tmp_path / "a.csv", JOB)
    file.write([row(1)])  # it makes the columns: the file is another one now, and locked too
    with pytest.raises(InvalidSetting, match="another process writes it"):
        CsvFile(tmp_path / "a.csv", JOB)
    file.close()


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Inside the block this process writes no file of more than `size` bytes, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


def test_a_full_disk_is_said_and_whole_lines_stay(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    written(path, row(1))
    file = CsvFile(path, JOB)
    with largest_file(path.stat().st_size + 10), pytest.raises(KvpsError, match="File too large"):
        file.write([row(2)])
    assert file.last == 1
    file.close()
    written(path, row(2))
    assert [each["version"] for each in found(path)] == ["1", "2"]
