"""The file of a job's log: one entry a line. It is appended to, and searched from its end."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Container, Iterable, Iterator
from pathlib import Path
from typing import IO

from kvps.errors import CorruptData, KvpsError
from kvps.machine.files import own, regular, sync_directory
from kvps.parsing import Fields, file_name, text
from kvps.protocol.job_state import Entry

_BLOCK = 1 << 16
MOST_FIELD = 64 << 20
MOST_LINE = 4 * MOST_FIELD
"""The most bytes of a line: two long fields, in which each quote has a backslash. A file with more is not read on: a
sparse tail costs its author nothing."""


class LogFile:
    """The file of one job's log."""

    def __init__(self, directory: Path, job: str, id: str) -> None:
        self.path = directory / file_name(f"{job}.{id}.log.jsonl", "the name of a log's file")

    def extend(self, stream: Iterable[Entry]) -> Entry | None:
        """Append those entries of `stream`, given from its first on, that the file lacks; return the stream's last one.

        Ids do not tell what the file lacks: a server that lost its last writes, and whose clock runs behind, writes
        entries under lower ids than the lost ones had. A lock admits one process at a time. The file gets each entry
        once, however often a writer is killed. Raises KvpsError.
        """
        last = None
        try:
            with open(self.path, "a+b", opener=own) as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                file.truncate(_whole(file))  # drop what a killed writer left of a line
                known: Container[bytes] | None = None
                for last in stream:
                    line = line_of(last)
                    known = _since(file, line) if known is None else known
                    if line not in known:
                        known = ()
                        file.write(line)
                file.flush()
                os.fsync(file.fileno())
            sync_directory(self.path.parent)
        except OSError as error:
            raise KvpsError(f"could not write {self.path}: {error.strerror}") from None
        return last

    def entries(self) -> Iterator[Entry]:
        """Yield all entries. Raises CorruptData, KvpsError."""
        with self.open() as file:
            yield from (entry_of(line, self.path) for line in whole_lines(file))

    def first(self) -> Entry | None:
        """Return the first entry; None without a file. Raises CorruptData, KvpsError."""
        return next(self.entries(), None) if self.path.exists() else None

    def open(self) -> IO[bytes]:
        """Open the file to read it. Raises KvpsError."""
        try:
            return open(self.path, "rb", opener=regular)
        except OSError as error:
            raise KvpsError(f"{self.path} cannot be read: {error.strerror}") from None


def whole_lines(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the lines from the file's position to its last whole line."""
    while (line := file.readline(MOST_LINE)).endswith(b"\n"):
        yield line
    if len(line) == MOST_LINE:
        raise _too_long(file)
    file.seek(-len(line), os.SEEK_CUR)


def line_of(entry: Entry) -> bytes:
    return json.dumps({"entry": entry[0]} | entry[1]).encode() + b"\n"


def entry_of(line: bytes, path: Path) -> Entry:
    try:
        fields = Fields.of_json(line.decode(errors="replace"), str(path)).scalars(MOST_FIELD)
        return text(fields.pop("entry", None), "its id"), {**fields, "kind": text(fields.get("kind"), "its kind")}
    except CorruptData:
        raise CorruptData(f"{path} is damaged: {line[:40]!r}… is no entry of a commit log") from None


def _blocks(file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield the blocks of the file, from the last to the first, with the places where they begin."""
    start = file.seek(0, os.SEEK_END)
    while start:
        begin = max(0, start - _BLOCK)
        file.seek(begin)
        yield begin, file.read(start - begin)
        start = begin


def _backwards(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the lines of a file of whole lines, from the last to the first."""
    rest: list[bytes] = []  # of the line that begins in an earlier block, its last piece first
    for _, block in _blocks(file):
        *lines, last = block.splitlines(keepends=True)
        if rest and last.endswith(b"\n"):
            yield b"".join(reversed(rest))
            rest.clear()
        rest.append(last)
        if lines:
            yield b"".join(reversed(rest))
            yield from reversed(lines[1:])
            rest = [lines[0]]
    if rest:
        yield b"".join(reversed(rest))


def _whole(file: IO[bytes]) -> int:
    """Return where the last whole line ends. Raises CorruptData."""
    end = file.seek(0, os.SEEK_END)
    for begin, block in _blocks(file):
        if (place := block.rfind(b"\n")) >= 0:
            return begin + place + 1
        if end - begin > MOST_LINE:
            raise _too_long(file)
    return 0


def _too_long(file: IO[bytes]) -> CorruptData:
    return CorruptData(f"{file.name} is damaged: a line of it has more than {MOST_LINE >> 20} MB")


def _since(file: IO[bytes], line: bytes) -> set[bytes]:
    """Return the lines from the last occurrence of `line` on; none if the file lacks it. Searches from the end."""
    known = set[bytes]()
    for each in _backwards(file):
        known.add(each)
        if each == line:
            return known
    return set()
