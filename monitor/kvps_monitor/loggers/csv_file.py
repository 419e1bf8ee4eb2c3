"""Rows in a CSV file, one a line. A file that a killed process left goes on after its last whole line.

    version,job,at_ms,contributions,...,loss/w0,...

An evaluation is a row of its own, behind that of its version, with figures under eval/ alone: it comes later.
A new figure, as of a worker that joins late, is a new column: the file is then written again beside itself and renamed.
"""

from __future__ import annotations

import csv
import fcntl
import io
import os
import secrets
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from kvps.errors import InvalidSetting
from kvps.machine.files import private
from kvps_monitor.loggers.lineage import Lineage
from kvps_monitor.loggers.logger import Logger
from kvps_monitor.loggers.rows import Row

_FIRST = ("version", "job", "at_ms")
_MOST_DIGITS = 15  # of a version or a time


class CsvFile(Logger):
    """A logger."""

    def __init__(self, path: Path, lineage: Lineage) -> None:
        """Open or make the file. Raises InvalidSetting for a file of other content, of another job or in use."""
        super().__init__(str(path))
        self._path = path
        self._mark = lineage.mark
        self._columns: list[str] = []
        with self._told_as(InvalidSetting):
            self._file = _locked(path)
            try:
                self._continue(lineage)
            except BaseException as error:
                os.close(self._file)
                if isinstance(error, UnicodeDecodeError | csv.Error):
                    raise InvalidSetting(f"{path} is no log of kvps: it is no text") from None
                raise

    def _write(self, rows: Sequence[Row]) -> None:
        """Append rows, and hand them to the system. If that fails, the file has none of them."""
        names = dict.fromkeys(name for row in rows for name in row.values)
        new = [name for name in names if name not in self._columns]
        if new or not self._columns:  # a row may have no figure: a learner need not say a loss
            self._columns = [*(self._columns or _FIRST), *new]
            self._write_again(lambda cells: True)
        text = io.StringIO()
        writer = csv.DictWriter(text, self._columns, restval="", lineterminator="\n")
        for row in rows:
            head = {"version": row.version, "job": self._mark, "at_ms": row.at_ms}
            writer.writerow(head | {name: f"{value:.9g}" for name, value in row.values.items()})
        _append(self._file, text.getvalue().encode())

    def _close(self) -> None:
        os.close(self._file)

    def _continue(self, lineage: Lineage) -> None:
        """Read what the file has, and only if it is this job's drop what does not stay."""
        begins = ",".join(_FIRST).encode()
        with self._path.open("rb") as file:
            head = file.read(len(begins))
            whole = _whole(file)
        if head != begins[: len(head)] or (whole and len(head) < len(begins)):
            raise InvalidSetting(f"{self._path} is no log of kvps: its first columns are not {', '.join(_FIRST)}")
        mark, last = "", 0
        lines = self._lines(whole)
        self._columns = next(lines, [])
        of_evaluations = [n for n, name in enumerate(self._columns) if name.startswith("eval/")]
        for cells in lines:
            version, at_ms = self._numbers(cells)
            last, mark = max(last, version), cells[1]
            if any(cells[n] for n in of_evaluations):
                self.evaluated = max(self.evaluated, at_ms)
        if mark:
            try:
                self.last = lineage.kept(mark, last)
            except InvalidSetting as error:
                raise InvalidSetting(f"{self._path}: {error}") from None
        os.truncate(self._path, whole)
        if self.last < last:
            self._write_again(lambda cells: self._numbers(cells)[0] <= self.last)

    def _numbers(self, cells: list[str]) -> tuple[int, int]:
        """Return the version and the time of a row. Raises InvalidSetting."""
        whole = len(cells) == len(self._columns)
        if not whole or not all(cells[n].isdecimal() and len(cells[n]) <= _MOST_DIGITS for n in (0, 2)):
            raise InvalidSetting(f"{self._path} is damaged: {','.join(cells)[:40]!r} is no row of a log")
        return int(cells[0]), int(cells[2])

    def _lines(self, end: int) -> Iterator[list[str]]:
        """Yield the cells of each line that begins before `end`."""
        at = 0
        with self._path.open("rb") as file:
            for line in file:
                if at < end:
                    yield next(csv.reader([line.decode()]), [""])
                at += len(line)

    def _write_again(self, keeps: Callable[[list[str]], bool]) -> None:
        """Write a file with all columns, and the rows that `keeps` returns True for, and put it in the old one's place.
        Raises OSError; then the old one stays as it was."""
        aside = self._path.with_name(f".{self._path.name}.{secrets.token_hex(4)}")
        lines = self._lines(self._path.stat().st_size)
        before = len(next(lines, []))
        try:
            with open(aside, "x", opener=private, newline="") as file:
                writer = csv.writer(file, lineterminator="\n")
                writer.writerow(self._columns)
                for cells in lines:
                    if keeps(cells):
                        writer.writerow(cells + [""] * (len(self._columns) - before))
            fresh = _locked(aside)
            aside.replace(self._path)
        except OSError:
            with suppress(OSError):
                aside.unlink()
            raise
        os.close(self._file)
        self._file = fresh


def _append(file: int, data: bytes) -> None:
    """Append data to an open file, or nothing of it. Raises OSError."""
    end, rest = os.fstat(file).st_size, memoryview(data)
    try:
        while rest:
            rest = rest[os.write(file, rest) :]
    except OSError:
        with suppress(OSError):
            os.ftruncate(file, end)
        raise


def _locked(path: Path) -> int:
    """Open a file that one process at a time may write. Raises OSError, InvalidSetting."""
    file = private(str(path), os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise InvalidSetting(f"{path} is no regular file: name a file")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        raise InvalidSetting(f"{path}: another process writes it") from None
    return file


def _whole(file: IO[bytes]) -> int:
    """Return where the last whole line ends: a killed process may have left a part of one."""
    end = 0
    file.seek(0)
    for line in file:
        if line.endswith(b"\n"):
            end += len(line)
    return end
