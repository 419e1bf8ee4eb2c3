"""Files and directories that are their owner's only, though the umask would let others read them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.commands import TINY, kvps_run
from helpers.harness import log_entries, model
from kvps_aggregator.verify.chain import Unproved
from kvps_aggregator.verify.recording import Recorded, Recorder

from kvps.history.log_file import LogFile
from kvps.machine.files import make_directory, own, private, regular
from kvps.store import Store


@pytest.fixture(autouse=True)
def no_umask() -> Iterator[None]:
    """A umask that takes nothing away."""
    before = os.umask(0)
    yield
    os.umask(before)


def _open_to_others(folder: Path) -> list[str]:
    """Return what others may read or enter in a folder that exists."""
    found = sorted(folder.rglob("*"))
    assert found
    return [f"{path.relative_to(folder)} {path.stat().st_mode:o}" for path in found if path.stat().st_mode & 0o077]


def test_a_directory_and_those_above_it(tmp_path: Path) -> None:
    make_directory(tmp_path / "a" / "b" / "c")
    make_directory(tmp_path / "a" / "b" / "c")
    assert (tmp_path / "a" / "b" / "c").is_dir()
    assert _open_to_others(tmp_path) == []
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        make_directory(tmp_path / "file" / "a")
    with pytest.raises(FileExistsError):
        make_directory(tmp_path / "file")


@pytest.mark.parametrize("mode", ["w", "xb", "ab", "a+b"])
def test_a_new_file(tmp_path: Path, mode: str) -> None:
    open(tmp_path / "new", mode, opener=private).close()
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o600


def test_checkpoints_logs_and_records(store: Store, tmp_path: Path) -> None:
    job = store.create_job("mine", model())
    found = job.checkpoint()
    found.write(tmp_path / found.filename)
    LogFile(tmp_path, "mine", job.id).extend(log_entries(job))
    Recorder(tmp_path / "records" / "deep", "mine", job.id, 0).initial(np.zeros(4, np.float32), "0")
    assert len(list(tmp_path.rglob("*"))) == 7
    assert _open_to_others(tmp_path) == []


@pytest.mark.slow
def test_all_that_a_run_writes(home: Path, tmp_path: Path) -> None:
    """Also what the private server writes, into a directory that was there before and that others may enter."""
    (tmp_path / "data").mkdir(mode=0o755)
    done = kvps_run(
        *("up", "digits", *TINY, "--report", "report.json", "--data-dir", "data", "--record", "records/deep"),
        *("--checkpoint-every", "5", "--checkpoints", "saved/deep", "--kill-every", "1000"),
    )
    assert done.returncode == 0, done.stderr
    (tmp_path / "data").chmod(0o700)
    assert {path.name for path in tmp_path.iterdir()} == {"report.json", "data", "records", "saved"}
    assert any((tmp_path / "data").rglob("*.aof"))
    assert _open_to_others(tmp_path) == []
    assert _open_to_others(home) == []


# -- what another user may have put there -------------------------------------------------------------------------


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    victim, link = tmp_path / "victim", tmp_path / "link"
    victim.write_text("precious")
    link.symlink_to(victim)
    with pytest.raises(OSError, match="symbolic links"):
        own(str(link), os.O_RDWR | os.O_CREAT)
    link.unlink()
    link.symlink_to(tmp_path / "nothing yet")
    with pytest.raises(OSError, match="symbolic links"):
        own(str(link), os.O_RDWR | os.O_CREAT)
    assert victim.read_text() == "precious"
    assert not (tmp_path / "nothing yet").exists()


@pytest.mark.parametrize("opener", [own, regular])
def test_a_fifo_is_refused_and_keeps_nobody_waiting(tmp_path: Path, opener: Any) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with pytest.raises(OSError, match="no regular file"):
        opener(str(fifo), os.O_RDWR)


def test_a_file_of_another_user_is_not_added_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid():
        pytest.skip("no right to give a file to another user")
    other = tmp_path / "other"
    other.touch(0o666)
    os.chown(other, 12345, 12345)
    monkeypatch.setattr(os, "geteuid", lambda: 10001)
    with pytest.raises(PermissionError, match="another user"):
        own(str(other), os.O_RDWR)
    with open(other, "rb", opener=regular) as file:
        assert file.read() == b""
    os.chown(tmp_path, 12345, 12345)
    os.close(own(str(other), os.O_RDWR))  # who has the directory could do more


def test_a_record_that_claims_to_have_a_terabyte_is_not_read(store: Store, tmp_path: Path) -> None:
    job = store.create_job("job", model())
    weights = np.zeros(job.layout.size, np.float32)
    recorder = Recorder(tmp_path, "job", job.id, 0)
    recorder.initial(weights, "0" * 32)
    [file] = tmp_path.rglob("initial.*.f32")
    os.truncate(file, 1 << 40)
    with pytest.raises(Unproved, match="initial"):
        Recorded(tmp_path, "job", job.id, job.layout, "fp32").initial()
