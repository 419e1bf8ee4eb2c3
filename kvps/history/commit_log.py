"""The file into which a job's commit log is moved, and the reader of file and Redis stream as one log.

    DIR/<job>.<id>.log.jsonl    one entry per line, oldest first, each as it was in Redis, with its id

An aggregator moves the log into the file with each checkpoint, and when it is too long: it appends and syncs entries,
and only then trims them in Redis. If it is killed in between, entries are in both places, or the file ends in half a
line; the entries in both show where to continue. A restored job's log continues the log of its checkpoint's job.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from kvps.config import JobConfig
from kvps.history.log_file import MOST_FIELD, LogFile, entry_of, line_of, whole_lines
from kvps.history.log_stream import LogStream
from kvps.parsing import JOB_ID, Fields, text
from kvps.protocol.job_state import Begin, Commit, Entry, State, first_head
from kvps.protocol.scripts import JobScripts

_MOST_HELD = 200_000  # versions; who keeps more of them in Redis trims none


def keep(stream: LogStream, directory: Path, state: State, version: int) -> Entry | None:
    """Append the log up to the commit of `version` to the file; return the last entry of that part, or None.

    `state` may be from any time since the job began its present history. Raises KvpsError.
    """
    if version == state.begin.version:
        return None
    return LogFile(directory, stream.job, state.id).extend(_up_to(version, stream.entries()))


def move(stream: LogStream, scripts: JobScripts, directory: Path | None, state: State, version: int) -> None:
    """Move the log up to the commit of `version` from Redis into the file; without a directory, delete it. Raises
    KvpsError."""
    if directory:
        last = keep(stream, directory, state, version)
    else:
        last = next(iter(deque(_up_to(version, stream.entries()), maxlen=1)), None)
    if last and last[1].get("kind") == "commit":
        scripts.trim(state.history, last[0], _version(last[1]))


def _up_to(version: int, entries: Iterable[Entry]) -> Iterator[Entry]:
    """Yield the entries up to the commit of `version`."""
    held: list[Entry] = []  # entries move with the commit that follows them; those after the last commit wait
    for entry in entries:
        held.append(entry)
        if entry[1].get("kind") == "commit":
            made = _version(entry[1])
            if made <= version:
                yield from held
                held.clear()
            if made >= version:
                return


def _version(fields: Mapping[str, str]) -> int:
    return Fields(fields, "an entry of the log").whole("version")


class Log:
    """A job's commit log as far back as it exists: `begin`, and the `commits` after it, which may be read repeatedly.

    With a `directory` it has the entries that were moved there and, if its file is there too, the log of the job from
    whose checkpoint this one was restored. Raises CorruptData for a file that is no log, KvpsError, JobNotFound.
    """

    def __init__(self, stream: LogStream, state: State, directory: Path | None = None) -> None:
        file = LogFile(directory, stream.job, state.id) if directory else None
        if file and file.path.exists():
            source = _Source(lambda: _joined(file, stream))
        elif state.moved or state.version - state.begin.version <= _MOST_HELD:  # it may be trimmed while it is read
            left = _left(stream)
            source = _Source(lambda: iter(left))
        else:
            source = _Source(stream.entries)
        self.begin, self._sources = source.begin() or state.begin, [source]
        if directory and file and self.begin == state.begin:
            self.begin, self._sources = _traced(directory, source, state.begin, file.path)

    def inherited(self) -> dict[tuple[str, str], str]:
        """Return (worker, incarnation) -> name of the stored residual with which the incarnation began, "" for none.
        It has all incarnations whose join is in the log."""
        joins = (Fields(fields, "a join in the log") for fields in self.entries() if fields.get("kind") == "join")
        return {(j.name("worker"), j.word("incarnation")): j.text("residual", default="") for j in joins}

    def first_settings(self, config: JobConfig) -> JobConfig:
        """Return the settings that the first commit was made with, of a job that has `config` now."""
        for source in reversed(self._sources[1:]):
            _, fields = next(source.entries())
            config = with_changes(config, fields, 0)
        return config

    def entries(self) -> Iterator[Mapping[str, str]]:
        """Iterate over the fields of all entries, also of commits that a server has lost: an entry `recover`
        follows."""
        return (fields for source in self._sources for _, fields in source.entries())

    def commits(self) -> Iterator[Commit]:
        """Iterate over all commits after `begin`, except those that a server lost and that were made again. Each has
        what was noted since the one before it; of that, a server may have lost what stands before its recovery."""
        return chain.from_iterable(source.commits() for source in self._sources)


def with_changes(config: JobConfig, restore: Mapping[str, str], which: int = 1) -> JobConfig:
    """Return settings as an entry `restore` has changed them, or, with 0 for `which`, as they were before. Raises
    CorruptData."""
    f = Fields(restore, "a restore in the log")
    if not f.text("settings", MOST_FIELD, default=""):
        return config
    changes = f.json_fields("settings")
    pairs = {name: dict(enumerate(changes.sequence(name, 2))) for name in changes}
    texts = {name: text(pair.get(which), f"the setting {name}", MOST_FIELD) for name, pair in pairs.items()}
    return JobConfig.from_hash(config.to_hash() | texts, "a restore in the log")


class Origin(NamedTuple):
    """The checkpoint with which a job began: the name and the id of its job, and its version."""

    job: str
    id: str
    version: int


def origins(stream: LogStream, id: str, directory: Path) -> Iterator[Origin]:
    """Yield the checkpoint with which a job began, then the one with which that job began, and so on, as far as their
    logs are in the directory. Raises CorruptData, KvpsError."""
    page = stream.page("0-0")  # read before the file: an entry that is no longer in this page is then in the file
    file, seen = LogFile(directory, stream.job, id), set[Path]()
    while file.path not in seen and (origin := _origin(file.first() or next(iter(page), None))):
        yield origin
        seen.add(file.path)
        file, page = LogFile(directory, origin.job, origin.id), []


def _origin(first: Entry | None) -> Origin | None:
    """Return the checkpoint with which a job began whose log has this first entry; None without one."""
    if first is None or first[1].get("kind") != "restore":
        return None
    f = Fields(first[1], "the log's first entry")
    return Origin(f.name("job"), f.matching("id", *JOB_ID), f.whole("version"))


class _Source(NamedTuple):
    """A part of a log: the entries of one job. The commits up to version `up_to` count."""

    entries: Callable[[], Iterator[Entry]]
    up_to: float = float("inf")

    def begin(self) -> Begin | None:
        """Return the point from which the first entry continues; None if there is no entry."""
        for _, fields in self.entries():
            f, kind = Fields(fields, "the log's first entry"), fields.get("kind")
            if kind == "create":
                return Begin(0, first_head(f.word("history")), 0)
            if kind == "restore":
                return Begin(_version(fields), f.word("head"), f.whole("contributions"))
            if kind == "commit":
                plan = Commit.of(fields).plan
                return Begin(plan.version - 1, plan.head, plan.progress)
        return None

    def commits(self) -> Iterator[Commit]:
        # A server that lost its last writes continues from an earlier version, with other entries than the file has.
        recovered = [(n, _version(f)) for n, (_, f) in enumerate(self.entries()) if f.get("kind") == "recover"]
        noted: list[Mapping[str, str]] = []
        for number, (_, fields) in enumerate(self.entries()):
            if fields.get("kind") != "commit":
                noted.append(fields)
                continue
            commit = Commit.of(fields)
            if commit.version <= self.up_to and all(commit.version <= v for n, v in recovered if n > number):
                yield replace(commit, noted=noted)
                noted = []


def _left(stream: LogStream) -> list[Entry]:
    """Return the log in Redis as one piece: without the entries that were trimmed while it was read."""
    while True:
        entries, first = list(stream.entries()), next(iter(stream.page("0-0")), None)
        if first is None:
            return []
        for number, (id, _) in enumerate(entries):
            if id == first[0]:
                return entries[number:]


def _traced(directory: Path, source: _Source, begin: Begin, own: Path) -> tuple[Begin, list[_Source]]:
    """Return a log, whose file is `own`, with the logs that it continues, as far as they are in the directory and lead
    to `begin`. A log that says that it continues itself has no other."""
    sources, seen = [source], {own}
    while origin := _origin(next(sources[0].entries(), None)):
        file = LogFile(directory, origin.job, origin.id)
        older = _Source(file.entries, begin.version)
        if file.path in seen or not file.path.exists() or not (start := older.begin()):
            break
        *_, reached = chain([start[:2]], ((c.version, c.head) for c in older.commits()))
        if reached != begin[:2]:
            break
        seen.add(file.path)
        sources.insert(0, older)
        begin = start
    return begin, sources


def _joined(file: LogFile, stream: LogStream) -> Iterator[Entry]:
    """Yield the entries of a file and then those in Redis, each once, even if more are moved meanwhile."""
    last, first = "0-0", b""
    recent: set[bytes] = set()  # the lines from the stream's first entry on
    with file.open() as opened:
        while True:
            # Read before the file: an entry that is no longer in this page is then in the file.
            page = [(line_of(entry), entry) for entry in stream.page(last)]
            first = first or (page[0][0] if page else b"")
            moved = False
            for line in whole_lines(opened):
                if line not in recent:
                    yield entry_of(line, file.path)
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
