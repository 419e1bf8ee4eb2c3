"""The commit log where it is longer than Redis holds: its file, and file and stream read as one.

    DIR/<job>.<id>.log.jsonl    one entry a line, oldest first, each as it stood in Redis, with its id

An aggregator that writes checkpoints moves the log into the file with each of them: entries are appended and synced,
and only then trimmed in Redis. Who is killed in between leaves entries in both places, or half a line: what stands in
both says where to go on. A restored job's log goes on from its checkpoint's job's.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Container, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import IO, NamedTuple, Protocol

from kvps.errors import CorruptData, KvpsError
from kvps.history.checkpoint import sync_directory
from kvps.protocol.job_state import Begin, Commit, Entry, State, first_head
from kvps.protocol.scripts import JobScripts

_BLOCK = 1 << 16


class LoggedJob(Protocol):
    """What is asked of a job here, see `kvps.job.Job`."""

    name: str
    scripts: JobScripts

    def page(self, after: str) -> list[Entry]: ...
    def entries(self) -> Iterator[Entry]: ...


class LogFile:
    """The file of one job's log."""

    def __init__(self, directory: Path, job: str, id: str) -> None:
        self.path = directory / f"{job}.{id}.log.jsonl"

    def extend(self, stream: Iterable[Entry]) -> Entry | None:
        """Append those entries of a stream, given from its first on, that are not here yet; the last of the stream.

        Their ids say nothing about what is here: a server that lost its last writes, and whose clock runs behind,
        writes entries under lower ids than those that it has lost. One process at a time; each entry comes once,
        however often this is cut short. Raises KvpsError.
        """
        last = None
        try:
            with self.path.open("a+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                file.truncate(_whole(file))  # what a killed writer could not end
                known: Container[bytes] | None = None
                for last in stream:
                    line = _line(last)
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
        """All entries. Raises CorruptData, KvpsError."""
        with self.open() as file:
            yield from (_entry(line, self.path) for line in _lines(file))

    def open(self) -> IO[bytes]:
        """The file, to be read. Raises KvpsError."""
        try:
            return self.path.open("rb")
        except OSError as error:
            raise KvpsError(f"{self.path} cannot be read: {error.strerror}") from None


def _lines(file: IO[bytes]) -> Iterator[bytes]:
    """The lines from where the file stands to its last whole one."""
    while (line := file.readline()).endswith(b"\n"):
        yield line
    file.seek(-len(line), os.SEEK_CUR)


def _line(entry: Entry) -> bytes:
    return json.dumps({"entry": entry[0]} | entry[1]).encode() + b"\n"


def _entry(line: bytes, path: Path) -> Entry:
    try:
        fields = json.loads(line)
        return fields.pop("entry"), {**fields, "kind": fields["kind"]}
    except (ValueError, LookupError, TypeError, AttributeError):
        raise CorruptData(f"{path} is damaged: {line[:40]!r}… is no entry of a commit log") from None


def _tails(file: IO[bytes]) -> Iterator[bytes]:
    """The end of the file, each time a block longer, up to all of it."""
    tail, start = b"", file.seek(0, os.SEEK_END)
    while start:
        begin = max(0, start - _BLOCK)
        file.seek(begin)
        tail = file.read(start - begin) + tail
        start = begin
        yield tail


def _whole(file: IO[bytes]) -> int:
    """Where the last whole line ends."""
    end = file.seek(0, os.SEEK_END)
    return next((end - len(tail) + tail.rindex(b"\n") + 1 for tail in _tails(file) if b"\n" in tail), 0)


def _since(file: IO[bytes], line: bytes) -> set[bytes]:
    """The lines from this one on, which is looked for from the end; none if it is not there."""
    for tail in _tails(file):
        if (at := tail.rfind(line)) >= 0:  # quotes inside a line are escaped: no other line ends like this one
            return set(tail[at:].splitlines(keepends=True))
    return set()


def keep(job: LoggedJob, directory: Path, state: State, version: int) -> Entry | None:
    """Append the log up to the commit of `version` to the file: the last entry of that, or None if there is none yet.

    `state` is of any time since the job began its present history. Raises KvpsError.
    """

    def up_to_version() -> Iterator[Entry]:
        held: list[Entry] = []  # goes with the commit behind it: what follows the last one here waits for the next
        for entry in job.entries():
            held.append(entry)
            if entry[1]["kind"] == "commit":
                at = int(entry[1]["version"])
                if at <= version:
                    yield from held
                    held.clear()
                if at >= version:
                    return

    if version == state.begin.version:
        return None
    return LogFile(directory, job.name, state.id).extend(up_to_version())


def move(job: LoggedJob, directory: Path, state: State, version: int) -> None:
    """Move the log up to the commit of `version` from Redis into the file. Raises KvpsError."""
    last = keep(job, directory, state, version)
    if last and last[1]["kind"] == "commit":
        job.scripts.trim(state.history, last[0], int(last[1]["version"]))


class Log:
    """A job's commit log as far back as it is there: `begin`, and `commits` behind that, as often as asked.

    With a `directory` what was moved there is a part of it, and so is, as far as it is there too, the log of the job
    from whose checkpoint this one was restored. Raises CorruptData for a file that is no log, KvpsError, JobNotFound.
    """

    def __init__(self, job: LoggedJob, state: State, directory: Path | None = None) -> None:
        own = LogFile(directory, job.name, state.id) if directory else None
        if own and own.path.exists():
            source = _Source(lambda: _joined(own, job))
        elif state.moved:  # what is left is short, and may be moved while it is read
            left = list(job.entries())
            source = _Source(lambda: iter(left))
        else:
            source = _Source(job.entries)
        begin = source.begin() if state.moved else None
        self.begin, self._sources = begin or state.begin, [source]
        if directory and self.begin == state.begin:
            self.begin, self._sources = _traced(directory, source, state.begin)

    def inherited(self) -> dict[tuple[str, str], str]:
        """Of all incarnations of which the join is there, by worker and incarnation: the name of the stored residual
        that it goes on with, "" is none."""
        entries = (fields for source in self._sources for _, fields in source.entries())
        joins = (fields for fields in entries if fields["kind"] == "join")
        return {(join["worker"], join["incarnation"]): join.get("residual", "") for join in joins}

    def commits(self) -> Iterator[Commit]:
        """All commits behind `begin`, but for those that a server lost and that were made again."""
        return chain.from_iterable(source.commits() for source in self._sources)


class _Source(NamedTuple):
    """A part of a log: the entries of one job, of which commits up to a version count."""

    entries: Callable[[], Iterator[Entry]]
    up_to: float = float("inf")

    def begin(self) -> Begin | None:
        """What its first entry goes on from; None if there is none."""
        for _, fields in self.entries():
            if fields["kind"] == "create":
                return Begin(0, first_head(fields["history"]), 0)
            if fields["kind"] == "restore":
                return Begin(int(fields["version"]), fields["head"], int(fields["contributions"]))
            if fields["kind"] == "commit":
                plan = Commit.of(fields).plan
                return Begin(plan.version - 1, plan.head, plan.progress)
        return None

    def commits(self) -> Iterator[Commit]:
        # A server that had lost its last writes goes on from an earlier version, with other entries than the file has.
        recovered = [(n, int(f["version"])) for n, (_, f) in enumerate(self.entries()) if f["kind"] == "recover"]
        for number, (_, fields) in enumerate(self.entries()):
            if fields["kind"] == "commit":
                commit = Commit.of(fields)
                if commit.version <= self.up_to and all(commit.version <= v for n, v in recovered if n > number):
                    yield commit


def _traced(directory: Path, source: _Source, begin: Begin) -> tuple[Begin, list[_Source]]:
    """A log together with those that it goes on from, as far as they are in the directory and lead to `begin`."""
    first = next(source.entries(), None)
    if first and first[1]["kind"] == "restore":
        file = LogFile(directory, first[1]["job"], first[1]["id"])
        older = _Source(file.entries, begin.version)
        if file.path.exists() and (start := older.begin()):
            *_, (version, head) = chain([start[:2]], ((c.version, c.head) for c in older.commits()))
            if (version, head) == begin[:2]:
                root, sources = _traced(directory, older, start)
                return root, [*sources, source]
    return begin, [source]


def _joined(file: LogFile, job: LoggedJob) -> Iterator[Entry]:
    """What was moved into a file and then what stands in Redis, each entry once, though more is moved meanwhile."""
    last, first = "0-0", b""
    recent: set[bytes] = set()  # what has come since the stream's first entry
    with file.open() as opened:
        while True:
            # Looked at before the file: what is no more in this page is then in the file.
            page = [(_line(entry), entry) for entry in job.page(last)]
            first = first or (page[0][0] if page else b"")
            moved = False
            for line in _lines(opened):
                if line not in recent:
                    yield _entry(line, file.path)
                    moved = True
                if recent or line == first:
                    recent.add(line)
            for line, entry in page:
                if line not in recent:
                    yield entry
                    recent.add(line)
            if not page and not moved:
                return
            last = page[-1][1][0] if page else last
