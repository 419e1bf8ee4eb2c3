"""A directory of checkpoints: what is in it, the newest one of a job, and which of them are kept."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from kvps.errors import CorruptData, KvpsError
from kvps.history.checkpoint import Checkpoint
from kvps.history.tensor_file import SUFFIX
from kvps.parsing import NAME, file_name


class Newest(NamedTuple):
    """The newest checkpoint of a job that can be read, and the names of the newer files that are damaged."""

    path: Path
    checkpoint: Checkpoint
    damaged: list[str]


def listed(directory: Path) -> Iterator[tuple[Path, Checkpoint | None]]:
    """Yield a directory's checkpoint files in the order of their names, each with its Checkpoint, None if damaged."""
    for path in sorted(directory.glob(f"[!.]*{SUFFIX}")):
        try:
            yield path, Checkpoint.load(path)
        except KvpsError:
            yield path, None


def jobs_in(directory: Path) -> set[str]:
    """Return the names of the jobs of which a directory has checkpoints."""
    return {match["job"] for _, match in _files(directory)}


def ended_file(directory: Path, run: str, id: str) -> Path:
    """Return the file that says that a run has made its last job, and finished all."""
    return directory / file_name(f"{run}.{id}.ended", "the name of a file that says that a run has ended")


def note_end(directory: Path, run: str, id: str) -> None:
    """Note that a run has made its last job, and finished all. Without the note its script is only started again."""
    with suppress(OSError):
        ended_file(directory, run, id).touch(0o600)


def newest(directory: Path, job: str) -> Newest | None:
    """Return a job's newest checkpoint of those with the names that kvps gives; None if there is none.

    Successive jobs of one name have ids of their own, and the job that wrote last is the newest. Its files follow each
    other by version: their times say nothing of hosts whose clocks differ. Raises CorruptData if all are damaged.
    """
    of_id = dict[str, list[tuple[int, Path]]]()
    for path, match in _files(directory, job):
        of_id.setdefault(match["id"], []).append((int(match["version"]), path))
    if not of_id:
        return None
    damaged: list[str] = []
    for files in sorted(of_id.values(), key=lambda files: max(path.stat().st_mtime_ns for _, path in files))[::-1]:
        for _, path in sorted(files, reverse=True):
            try:
                return Newest(path, Checkpoint.load(path), damaged)
            except CorruptData:
                damaged.append(path.name)
    raise CorruptData(
        f"every checkpoint of job {job!r} in {directory} is damaged or cut short ({', '.join(damaged)}): remove "
        f"them to begin anew"
    )


def holds(directory: Path, job: str, id: str, version: int) -> bool:
    """Return whether a directory has a job's checkpoint of this version."""
    return any(int(match["version"]) == version for _, match in _files(directory, job, id))


def passed_over(found: Newest) -> str:
    """Return the line about newer files that are damaged."""
    return f"passed over, damaged or cut short: {', '.join(found.damaged)}"


def prune(directory: Path, job: str, id: str, keep: int) -> None:
    """Delete all but a job's last `keep` files."""
    for path in sorted(path for path, _ in _files(directory, job, id))[:-keep]:
        path.unlink(missing_ok=True)


def _files(directory: Path, job: str = "", id: str = "") -> Iterator[tuple[Path, re.Match[str]]]:
    """Yield the files that have the names of a job's checkpoints, or of any job's, and the parts of these names."""
    job, of = re.escape(job) or NAME.pattern, re.escape(id) or "[0-9a-f]{8}"
    name = re.compile(rf"(?P<job>{job})\.(?P<id>{of})-(?P<version>[0-9]{{8,16}}){re.escape(SUFFIX)}", re.ASCII)
    for path in directory.glob(f"[!.]*{SUFFIX}"):
        if match := name.fullmatch(path.name):
            yield path, match
