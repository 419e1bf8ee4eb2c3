"""Segments themselves: never written while they are read, and nowhere where others may write."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from helpers.harness import aggregating, await_version, model, work_on
from helpers.internals import segments_of
from helpers.shared_memory import OVER_SHM
from kvps_aggregator import Aggregator

import kvps
from kvps.store import Store
from kvps.transport import shared_memory
from kvps.transport.shared_memory import Segments


@pytest.fixture
def segments() -> Iterator[Segments]:
    found = Segments(shared_memory.memory_of("unix:///tests"), os.urandom(4).hex())
    found.ensure()
    yield found
    found.remove()
    assert not found.folder.exists()


def test_a_segment_is_not_written_anew_while_it_is_read(segments: Segments) -> None:
    made = segments.make("a", 100)
    made.data[:] = 7
    with segments.open("a", 100) as first, segments.open("a", 100):
        assert not made.renamed("b")
        assert (first == 7).all()
    other = Segments(shared_memory.memory_of("unix:///tests"), segments.folder.name)  # as another process has it
    with other.open("a", 100):
        assert segments.make("b", 100, [made]) is not made
    assert segments.make("c", 100, [made]) is made
    assert segments.names() == ["b", "c"]
    with pytest.raises(shared_memory.ChunkGone, match="segment a is gone"):
        segments.open("a", 100)
    with pytest.raises(shared_memory.ChunkGone, match="has 100 bytes, not 99"):
        segments.open("c", 99)
    with segments.open("c", 100) as held:
        segments.unlink(["c", "never"])
        assert not made.renamed("d"), "it was swept"
        made.data[:] = 9
        assert (held == 9).all(), "who has it open keeps it"


@pytest.mark.slow
def test_a_reader_that_comes_while_a_segment_is_renamed_has_the_one_or_none(segments: Segments) -> None:
    """Each file is filled with the number in its name; a maker renames and fills it as fast as it can."""
    made, over = segments.make("0", 4096), threading.Event()
    newest = [0]
    made.data[:] = 0

    def write() -> None:
        number = 0
        while not over.is_set():
            if made.renamed(f"{number + 1}"):
                number += 1
                made.data[:] = number % 251
                newest[0] = number

    writer = threading.Thread(target=write)
    writer.start()
    seen = 0
    while seen < 300:
        number = newest[0]
        with contextlib.suppress(shared_memory.ChunkGone), segments.open(f"{number}", 4096) as data:
            assert (data == number % 251).all()
            seen += 1
    over.set()
    writer.join()


def test_a_forked_child_gives_no_lock_of_its_parent_back(segments: Segments) -> None:
    made = segments.make("a", 100)
    with segments.open("a", 100):
        child = os.fork()
        if not child:
            for file in segments._files.values():
                file.leave()
            os._exit(0)
        os.waitpid(child, 0)
        assert not made.renamed("b")


def test_a_maker_that_sleeps_with_the_lock_holds_nobody_up(segments: Segments) -> None:
    made = segments.make("a", 100)
    fcntl.flock(made._fd, fcntl.LOCK_EX)
    with pytest.raises(shared_memory.ChunkGone):
        segments.open("a", 100)


_OTHERS = f"vm/0/{'0' * 16}/{'0' * 32}//1.1\n"


def test_what_redis_says_leads_nowhere_else(store: Store) -> None:
    job = store.create_job("job", model(), **OVER_SHM)
    folder = segments_of(job).folder  # type: ignore[union-attr]
    for evil in (
        "vm/0/../../../tmp",
        "vm/0/",
        "vm/0123456789abcdef",
        "vm/0/0123456789abcdef/../../1.1",
        _OTHERS,
        f"../{_OTHERS}",
    ):
        store.client.call("HSET", job.access.keys.config, "memory", evil)
        with pytest.raises(kvps.CorruptData, match="another program"):
            store.job("job")
    store.remove_job("job")
    shutil.rmtree(folder.parent)


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Path]:
    """A directory of another user, in which there is nothing before and after a test."""
    if os.geteuid():
        pytest.skip("only root can make a directory of another user")
    path = tmp_path / "outside"
    path.mkdir(mode=0o700)
    os.chown(path, 65534, 65534)
    yield path
    assert list(path.rglob("*")) == []


def _stand_in(place: Path, how: str, outside: Path) -> None:
    """Put what another user could have put there in the place of one of kvps's directories."""
    away = place.with_name("away")
    place.rename(away)
    if how == "a link to another's":
        place.symlink_to(outside)
    elif how == "a link to the same":
        place.symlink_to(away)
    else:
        shutil.copytree(away, place)
        os.chmod(place, 0o700 if how == "another's" else 0o777)
        os.chown(place, 65534 if how == "another's" else 0, 0)


@pytest.mark.parametrize(
    ("how", "level"), [("a link to another's", 0), ("a link to the same", 1), ("another's", 2), ("open to others", 0)]
)
def test_nothing_is_made_or_mapped_where_others_may_write(
    store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, outside: Path, how: str, level: int
) -> None:
    """At each level of the directory: who owns a file can cut it, and so end all who have it mapped."""
    monkeypatch.setattr(shared_memory, "ROOT", tmp_path)
    job = store.create_job("job", model(), **OVER_SHM)
    folder = segments_of(job).folder  # type: ignore[union-attr]
    with aggregating(job):
        work_on(job, "w0", 1)
        await_version(job, 1)
    _stand_in([folder, folder.parent, folder.parent.parent][level], how, outside)
    files = sorted(tmp_path.rglob("*"))
    again = store.job("job")
    segments = segments_of(again)
    assert segments
    assert not segments.here
    assert not segments.seen
    assert segments.names() == []
    with pytest.raises(kvps.ServerUnfit, match="must be yours with mode 0700"):
        again.join("w0")
    with pytest.raises((kvps.ServerUnfit, kvps.KvpsError)):
        segments.make("g:w0.1-a:1", 100)
    with pytest.raises((kvps.ServerUnfit, shared_memory.ChunkGone)):
        segments.open("identity", 32)
    aggregator = Aggregator(again, threading.Event())
    aggregator.hold(at_once=True)
    assert not aggregator.held.shards
    store.remove_job("job")
    assert sorted(tmp_path.rglob("*")) == files, "nothing is deleted there either"


@pytest.mark.parametrize("kind", ["a link", "another's", "a pipe", "a directory", "cut"])
def test_only_files_of_this_user_are_mapped(segments: Segments, tmp_path: Path, kind: str) -> None:
    path = segments.folder / "a"
    segments.make("b", 100)
    if kind == "a link":
        path.symlink_to("b")
    elif kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a directory":
        path.mkdir()
    elif kind == "cut":
        path.write_bytes(b"x")
    else:
        if os.geteuid():
            pytest.skip("only root can make a file of another user")
        path.write_bytes(bytes(100))
        os.chown(path, 65534, 65534)
    with pytest.raises(
        shared_memory.ChunkGone if kind == "cut" else kvps.ServerUnfit, match=r"segment a|a file of yours|a cannot"
    ):
        segments.open("a", 100)


def test_auto_goes_through_redis_where_others_may_write(
    store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shared_memory, "ROOT", tmp_path)
    (tmp_path / f"kvps-{os.getuid()}").mkdir()
    os.chmod(tmp_path / f"kvps-{os.getuid()}", 0o777)
    assert store.create_job("job", {"x": np.zeros(600_000, np.float32)}).config.transport == "redis"
    assert "must be a directory of yours with mode 0700" in caplog.text
    with pytest.raises(kvps.ServerUnfit, match="must be a directory of yours"):
        store.create_job("other", model(), **OVER_SHM)
