"""Copies of weights that the processes of a host share: whole, unchanged while in use, and no process waits in vain."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.harness import commit_steadily
from helpers.internals import segments_of
from helpers.waiting import eventually

import kvps
from kvps.arrays.layout import DTYPE, Array
from kvps.store import Store
from kvps.transport.host_copy import HostCopy, Progress, Read

ITEMS = 300_000
ID = "0123abcd"
READERS = 8

pytestmark = pytest.mark.usefixtures("forked")

_spawn = multiprocessing.get_context("spawn")


@pytest.fixture
def note(runtime: Path) -> Path:
    """Where the note of job ID is; the runtime directory is this test's alone."""
    return runtime / "copies" / ID


def constant(version: int) -> Read:
    """A read of Redis that finds this version; all weights equal its number."""

    def read(flat: Array, progress: Progress) -> tuple[int, str]:
        flat.fill(version)
        progress()
        return version, f"{version}.term"

    return read


def refuse(flat: Array, progress: Progress) -> tuple[int, str]:
    raise AssertionError("there is a copy: nobody need read Redis")


def later() -> int:
    """A time after which nobody has looked yet: no copy is taken for its age."""
    return time.monotonic_ns() + 10**12


def test_one_reads_for_all_and_nobody_can_write(note: Path) -> None:
    maker, other = HostCopy(ID, ITEMS), HostCopy(ID, ITEMS)
    began = time.monotonic_ns()
    assert maker.newest("7.term", began, constant(7)) is not None
    found = other.newest("7.term", later(), refuse)
    assert found
    version, flat = found
    assert (version, flat.dtype, flat.shape) == (7, DTYPE, (ITEMS,))
    assert (flat == 7).all()
    assert not flat.flags.writeable
    with pytest.raises(ValueError, match="WRITEABLE"):
        flat.flags.writeable = True
    assert (maker.reads, other.reads) == (1, 0)
    assert other.newest("6.term", began, refuse), "it was the newest after the caller began"
    assert note.stat().st_mode & 0o777 == 0o600


def test_a_copy_in_use_does_not_change_and_others_are_written_anew(note: Path) -> None:
    maker, other = HostCopy(ID, ITEMS), HostCopy(ID, ITEMS)
    kept = []
    for version in range(1, 12):
        made = maker.newest(f"{version}.term", later(), constant(version))
        found = other.newest(f"{version}.term", later(), refuse)
        assert made
        assert found
        if version in (2, 5):
            kept += [made, found]
        del made, found
    for version, flat in kept:
        assert (flat == version).all()
    mine = os.listdir("/proc/self/fd")
    memories = {os.readlink(f"/proc/self/fd/{fd}") for fd in mine if os.path.exists(f"/proc/self/fd/{fd}")}
    assert len([name for name in memories if f"memfd:kvps-{ID}" in name]) <= 5, "three of the maker, two in use"


@pytest.mark.parametrize("there", ["text", "stdin", "link", "directory", "pipe", "open to others"])
def test_what_is_no_note_is_worked_around(note: Path, tmp_path: Path, there: str) -> None:
    """The caller then reads Redis itself, or writes the note anew; what a link points to is not touched."""
    target = tmp_path / "target"
    target.write_text("mine")
    note.parent.mkdir(mode=0o700)
    writes: dict[str, Callable[[], Any]] = {
        "text": lambda: note.write_bytes(b"\xff\n" * 1000),
        "stdin": lambda: note.write_text(f"{os.getpid()} 0 {'0' * 16} {later()} 0 7 7.term\n"),
        "link": lambda: note.symlink_to(target),
        "directory": note.mkdir,
        "pipe": lambda: os.mkfifo(note),
        "open to others": lambda: note.parent.chmod(0o777),
    }
    writes[there]()
    found = HostCopy(ID, ITEMS).newest("7.term", 0, constant(7))
    if there in ("text", "stdin"):
        assert found
        assert (found[1] == 7).all()
    else:
        assert found is None
    assert target.read_text() == "mine"


@pytest.mark.parametrize("ago_s", [2, pytest.param(-3600, id="the clock was set back by an hour")])
def test_a_process_that_is_stopped_holds_up_nobody(note: Path, monkeypatch: pytest.MonkeyPatch, ago_s: float) -> None:
    """Who comes sleeps no longer than the last reader rests."""
    sleep, slept = time.sleep, list[float]()

    def counted(seconds: float) -> None:
        slept.append(seconds)
        sleep(seconds)

    monkeypatch.setattr(time, "sleep", counted)
    maker = HostCopy(ID, ITEMS)
    assert maker.newest("1.term", 0, constant(1))
    with note.open("rb+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        os.utime(note, (0, time.time() - ago_s))
        assert HostCopy(ID, ITEMS).newest("2.term", later(), refuse) is None
        assert sum(slept) < 2


def _make(home: str, id: str) -> None:
    os.environ["KVPS_RUNTIME_DIR"] = home
    maker = HostCopy(id, ITEMS)
    assert maker.newest("1.term", 0, constant(1))
    if id != ID:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_notes_go_with_their_processes(runtime: Path, note: Path) -> None:
    """The note of a process that was killed is deleted by the next that makes a copy."""
    for id, left in (("ffffffff", ["ffffffff"]), (ID, [])):
        process = _spawn.Process(target=_make, args=(str(runtime), id))
        process.start()
        process.join()
        assert os.listdir(note.parent) == left


# -- whole jobs ----------------------------------------------------------------------------------------------------


def _read(url: str, home: str, results: Any, done: Path) -> None:
    os.environ["KVPS_RUNTIME_DIR"] = home
    os.nice(10)
    with kvps.connect(url) as store:
        job = store.job("job")
        torn, versions = 0, []
        while not done.exists():  # an event would keep its lock if a process is killed
            version, weights = job.snapshot()
            torn += bool((weights["x"] != version).any())
            versions.append(version)
            aside = done.with_name(f"aside-{os.getpid()}")
            aside.write_text(str(version))
            aside.replace(done.with_name(f"reads-{os.getpid()}"))  # never an empty file, however slow this process is
        results.put((torn, versions, job.access.reader.reads, job.access.reader.fetched))
        assert eventually(done.with_name("over").exists)  # a process that ends takes its copy with it


def _leader(note: Path) -> int:
    words = note.read_text().split() if note.exists() else []
    return int(words[0]) if len(words) > 6 else 0


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["redis", "shm"])
def test_readers_see_whole_versions_in_rising_order(store: Store, runtime: Path, transport: str) -> None:
    """Over Redis, the process that reads for the others is killed, twice; the others go on."""
    start = {"x": np.zeros(ITEMS, DTYPE)}
    job = store.create_job("job", start, reduction="sum", optimizer=kvps.SGD(lr=1.0), transport=transport)
    note = runtime / "copies" / job.id
    over, begun, results, done = _spawn.Event(), _spawn.Event(), _spawn.Queue(), runtime / "done"
    writer = _spawn.Process(target=commit_steadily, args=(store.url, over, begun))
    readers = [_spawn.Process(target=_read, args=(store.url, str(runtime), results, done)) for _ in range(READERS)]
    for process in (writer, *readers):
        process.start()
    assert begun.wait(120)
    assert eventually(lambda: len(list(runtime.glob("reads-*"))) == READERS)
    pids = {reader.pid: reader for reader in readers}
    for _ in range(2 if transport == "redis" else 0):
        assert eventually(lambda: _leader(note) in pids)
        killed = pids.pop(_leader(note))
        killed.kill()
        killed.join()
    reached = job.state().version
    assert eventually(lambda: all(int((runtime / f"reads-{pid}").read_text()) > reached for pid in pids))
    done.touch()
    got = [results.get(timeout=120) for _ in range(len(pids))]
    over.set()
    (runtime / "over").touch()
    for process in (writer, *readers):
        process.join(120)
        assert process.exitcode in (0, -signal.SIGKILL)
    for torn, versions, *_ in got:
        assert not torn
        assert versions == sorted(versions)
        assert versions[-1] > reached
    if transport == "redis":
        from_redis, reads = sum(number for *_, number, _ in got), sum(len(versions) for _, versions, *_ in got)
        assert from_redis < reads / 2, "one reads for all"
    else:
        assert not any(copies for *_, copies in got)
    assert not (runtime / "copies").exists() or os.listdir(runtime / "copies") == []
    store.remove_job("job")
    segments = segments_of(job)
    assert not segments or not segments.folder.exists()
