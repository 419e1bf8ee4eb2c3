"""What all loggers share: which rows are new to one, and how its errors are told."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kvps.errors import KvpsError
from kvps_monitor.loggers.rows import Row


class Logger:
    """Something that rows are written to. `last` is the version of the last row that it has, 0 without one; `evaluated`
    is the time of the last evaluation, in ms."""

    FAILS: type[Exception] = OSError

    def __init__(self, where: str) -> None:
        """Errors begin with `where`."""
        self.last = self.evaluated = 0
        self._where = where

    def write(self, rows: Sequence[Row]) -> None:
        """Write those rows that it does not have: versions, and then evaluations of versions whose rows it has. Raises
        KvpsError."""
        made = [row for row in rows if not row.is_evaluation and row.version > self.last]
        evaluated = [row for row in rows if row.is_evaluation and row.at_ms > self.evaluated]
        with self._told_as(KvpsError):
            if made:
                self._write(made)
                self.last = made[-1].version
            if evaluated:
                self._write(evaluated)
                self.evaluated = evaluated[-1].at_ms

    def close(self) -> None:
        """End the logger. Raises KvpsError."""
        with self._told_as(KvpsError):
            self._close()

    @contextmanager
    def _told_as(self, kind: type[KvpsError]) -> Iterator[None]:
        """Have what fails raise an error of this kind, in one line."""
        try:
            yield
        except KvpsError:
            raise
        except self.FAILS as error:
            words = str(error)
            if isinstance(error, OSError) and error.strerror:
                of = "" if not error.filename or str(error.filename) in self._where else f": {error.filename}"
                words = error.strerror + of
            raise kind(f"{self._where}: {' '.join(words.split())}") from None

    def _write(self, rows: Sequence[Row]) -> None:
        raise NotImplementedError

    def _close(self) -> None:
        raise NotImplementedError
