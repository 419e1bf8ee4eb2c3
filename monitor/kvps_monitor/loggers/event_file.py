"""Rows as scalars of TensorBoard, in event files. Each process begins a file of its own.

    DIR/events.out.tfevents.<time>.<host>.kvps+<job>.<id>+<nonce>

A record of an event file is its length, a checksum of that, the bytes of an Event, and a checksum of these. A killed
process may leave a part of a record at the end, which every reader passes over.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from kvps.errors import InvalidSetting
from kvps.machine.files import make_directory, private
from kvps.parsing import NAME
from kvps_monitor.loggers.lineage import Lineage
from kvps_monitor.loggers.logger import Logger
from kvps_monitor.loggers.rows import Row

_ID = "[0-9a-f]{8}"
# No name has a +. Names had no dots either when dots were around the mark, as they still are in older files.
_OURS = re.compile(rf".*\.kvps(?:\+({NAME.pattern}\.{_ID})\+|\.([A-Za-z0-9_-]+\.{_ID})\.){_ID}", re.ASCII)
_MOST_RECORD = 1 << 24
_BEGIN = "events.out.tfevents."


class EventFile(Logger):
    """A logger. What it has is what is in its directory."""

    def __init__(self, directory: Path, lineage: Lineage) -> None:
        """Begin a file. Raises InvalidSetting for a directory of another job, or that cannot be written."""
        super().__init__(str(directory))
        self._event, self._summary, self._checksum = _library()
        self._directory = directory
        self.last, purged = self._continued(lineage)
        with self._told_as(InvalidSetting):
            make_directory(directory)
            name = f"{_BEGIN}{time.time():.0f}.{socket.gethostname()}.kvps+{lineage.mark}+{secrets.token_hex(4)}"
            self._file = open(directory.resolve() / name, "xb", opener=private)  # noqa: SIM115
            self._add(self._event(wall_time=time.time(), file_version="brain.Event:2"))
            if purged:  # readers then leave out what was trained after the checkpoint, and lost
                session = self._event(wall_time=0.0, step=self.last + 1)
                session.session_log.status = session.session_log.START
                self._add(session)

    def _write(self, rows: Sequence[Row]) -> None:
        """Append rows, and hand them to the disk. Readers sort evaluations, each at the step of its version."""
        for row in rows:
            values = [self._summary.Value(tag=name, simple_value=value) for name, value in row.values.items()]
            self._add(self._event(wall_time=row.at_ms / 1000, step=row.version, summary=self._summary(value=values)))
        self._file.flush()
        os.fsync(self._file.fileno())

    def _add(self, event: Any) -> None:
        """Append a record, see `records`."""
        data: bytes = event.SerializeToString()
        for part in (len(data).to_bytes(8, "little"), data):
            self._file.write(part + self._checksum(part).to_bytes(4, "little"))

    def _close(self) -> None:
        self._file.close()

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


def _library() -> tuple[Any, Any, Callable[[bytes], int]]:
    """Return the messages Event and Summary, and the checksum of records: tensorboardX's, or those of TensorBoard, with
    which PyTorch's SummaryWriter writes."""
    try:
        from tensorboardX.proto import event_pb2, summary_pb2
        from tensorboardX.record_writer import masked_crc32c
    except ImportError:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import masked_crc32c
    return event_pb2.Event, summary_pb2.Summary, masked_crc32c


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
    found = sorted(directory.glob(f"{_BEGIN}*")) if directory.is_dir() else []
    return [(path, match[1] or match[2]) for path in found if (match := _OURS.fullmatch(path.name))]


def free_directory(begin: Path, lineage: Lineage) -> Path:
    """Return `begin`, or the first of `begin`-2, `begin`-3, ... that has no rows of another job."""
    number = 1
    while True:
        directory = begin if number == 1 else begin.with_name(f"{begin.name}-{number}")
        if all(lineage.belongs(mark) for _, mark in files_in(directory)):
            return directory
        number += 1
