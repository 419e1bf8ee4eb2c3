"""Rows as scalars of TensorBoard, in event files that tensorboardX writes. Each process begins a file of its own.

    DIR/events.out.tfevents.<time>.<host>.kvps+<job>.<id>+<nonce>

A record of an event file is its length, a checksum of that, the bytes of an Event, and a checksum of these. A killed
process may leave a part of a record at the end, which every reader passes over.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kvps.errors import InvalidSetting
from kvps.machine.files import make_directory
from kvps.parsing import NAME
from kvps_monitor.loggers.lineage import Lineage
from kvps_monitor.loggers.logger import Logger
from kvps_monitor.loggers.rows import Row

_ID = "[0-9a-f]{8}"
# No name has a +. Names had no dots either when dots were around the mark, as they still are in older files.
_OURS = re.compile(rf".*\.kvps(?:\+({NAME.pattern}\.{_ID})\+|\.([A-Za-z0-9_-]+\.{_ID})\.){_ID}", re.ASCII)
_MOST_RECORD = 1 << 24


class EventFile(Logger):
    """A logger. What it has is what is in its directory."""

    def __init__(self, directory: Path, lineage: Lineage) -> None:
        """Begin a file. Raises InvalidSetting for a directory of another job, or that cannot be written."""
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto import event_pb2, summary_pb2

        super().__init__(str(directory))
        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self._directory = directory
        self.last, purged = self._continued(lineage)
        with self._told_as(InvalidSetting):
            make_directory(directory)
            prefix = str(directory.resolve() / "events")
            self._writer = EventsWriter(prefix, f".kvps+{lineage.mark}+{secrets.token_hex(4)}")
            os.chmod(self._writer._file_name, 0o600)
            if purged:  # readers then leave out what was trained after the checkpoint, and lost
                session = self._event(wall_time=0.0, step=self.last + 1)
                session.session_log.status = session.session_log.START
                self._writer.write_event(session)

    def _write(self, rows: Sequence[Row]) -> None:
        """Append rows, and hand them to the disk. Readers sort evaluations, each at the step of its version."""
        for row in rows:
            values = [self._summary.Value(tag=name, simple_value=value) for name, value in row.values.items()]
            event = self._event(wall_time=row.at_ms / 1000, step=row.version, summary=self._summary(value=values))
            self._writer.write_event(event)
        self._writer.flush()

    def _close(self) -> None:
        self._writer.close()

    def _continued(self, lineage: Lineage) -> tuple[int, bool]:
        """Return the last version whose row stays, and whether rows after it are there."""
        last, ends, foreign = 0, 0, ""
        for path, mark in files_in(self._directory):
            if not lineage.belongs(mark):
                foreign = mark
                continue
            newest = 0
            for event in self._events(path):
                newest = max(newest, event.step)
                if any(value.tag.startswith("eval/") for value in event.summary.value):
                    self.evaluated = max(self.evaluated, round(1000 * event.wall_time))
            last, ends = max(last, lineage.kept(mark, newest)), max(ends, newest)
        if foreign:
            raise InvalidSetting(f"{self._directory} has the rows of another job ({foreign}): name another directory")
        return last, ends > last

    def _events(self, path: Path) -> Iterator[Any]:
        try:
            data = path.read_bytes()
        except OSError as error:
            raise InvalidSetting(f"{path}: {error.strerror}") from None
        for record in records(data):
            event = self._event()
            try:
                event.ParseFromString(record)
            except Exception:  # protobuf's own error
                raise InvalidSetting(f"{path} is damaged: name another directory") from None
            if event.HasField("summary"):
                yield event


def records(data: bytes) -> Iterator[bytes]:
    """Yield the whole records of an event file."""
    at = 0
    while at + 12 <= len(data):
        size = int.from_bytes(data[at : at + 8], "little")
        if size > _MOST_RECORD or at + 16 + size > len(data):
            return
        yield data[at + 12 : at + 12 + size]
        at += 16 + size


def files_in(directory: Path) -> list[tuple[Path, str]]:
    """Return the event files of kvps in a directory, each with the mark of its job."""
    found = sorted(directory.glob("events.out.tfevents.*")) if directory.is_dir() else []
    return [(path, match[1] or match[2]) for path in found if (match := _OURS.fullmatch(path.name))]


def free_directory(begin: Path, lineage: Lineage) -> Path:
    """Return `begin`, or the first of `begin`-2, `begin`-3, ... that has no rows of another job."""
    number = 1
    while True:
        directory = begin if number == 1 else begin.with_name(f"{begin.name}-{number}")
        if all(lineage.belongs(mark) for _, mark in files_in(directory)):
            return directory
        number += 1
