"""The file of a checkpoint: one wrong byte is caught, and who is killed while writing leaves the old one."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.checkpoints import PATIENT, saved, train_to
from helpers.harness import model
from helpers.waiting import eventually

import kvps
from kvps.history.checkpoint import Checkpoint
from kvps.history.checkpoint_directory import prune
from kvps.store import Store


def test_every_flipped_byte_is_caught_and_every_cut(store: Store, tmp_path: Path) -> None:
    job = store.create_job("job", model(), optimizer=kvps.SGD(0.05, momentum=0.9), **PATIENT)
    train_to(job, 3, 1)
    path = saved(job, tmp_path)
    whole, rng = path.read_bytes(), random.Random(4)
    header = 8 + int.from_bytes(whole[:8], "little")
    places = [*range(12), *range(header - 10, header + 10), *range(len(whole) - 8, len(whole))]
    places += rng.sample(range(header), 120) + rng.sample(range(header, len(whole)), 80)
    digest = whole.index(b'"digest":"')
    bad = tmp_path / "bad.safetensors"
    for place in [*places, *range(digest, digest + 44)]:
        for flip in (1 << rng.randrange(8), rng.randrange(1, 256)):
            bad.write_bytes(whole[:place] + bytes([whole[place] ^ flip]) + whole[place + 1 :])
            _refused(bad)
    for length in [0, 7, 8, 9, header - 1, header, len(whole) - 1, *rng.sample(range(len(whole)), 20)]:
        bad.write_bytes(whole[:length])
        _refused(bad)
    for foreign in (whole + b"\0", b"\0" * 100, b"\xff" * 100, os.urandom(200)):
        bad.write_bytes(foreign)
        _refused(bad)
    assert Checkpoint.load(path).version == 3


def _refused(path: Path) -> None:
    with pytest.raises(kvps.CorruptData) as error:
        Checkpoint.load(path)
    assert str(path) in str(error.value)


def test_a_file_longer_than_its_header_says_is_refused_unread(store: Store, tmp_path: Path) -> None:
    """A sparse tail of 200 GB kept the reader busy for a minute. This one is 2 GB."""
    path = saved(store.create_job("job", model()), tmp_path)
    os.truncate(path, 2 << 30)
    before = _bytes_read()
    _refused(path)
    assert _bytes_read() - before < 1 << 30


def _bytes_read() -> int:
    """Return how many bytes this process has read so far."""
    return int(Path("/proc/self/io").read_text().split()[1])


def test_no_name_of_a_job_leads_a_file_out_of_its_directory(store: Store) -> None:
    made = store.create_job("job", model()).checkpoint()
    with pytest.raises(kvps.CorruptData, match="the name of a checkpoint's file"):
        _ = replace(made, job="../../job").filename


WRITER = """
import sys, numpy as np, kvps
from pathlib import Path
from kvps.history.checkpoint import Checkpoint
made = Checkpoint.load(Path(sys.argv[1]))
print("writes", flush=True)
while True:
    made.write(Path(sys.argv[2]) / made.filename)
"""


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_who_is_killed_while_writing_leaves_the_old_file_and_no_rubbish(store: Store, tmp_path: Path) -> None:
    """What a killed writer left is gone after the next file of any job; a writer that lives is not disturbed."""
    job = store.create_job("job", {"x": np.arange(1_000_000, dtype=np.float32)}, **PATIENT)
    path, kept = saved(job, tmp_path), tmp_path / "kept"
    other = store.create_job("other", {"x": np.arange(10, dtype=np.float32)}).checkpoint()
    kept.mkdir()
    shutil.copy(path, kept)
    asides = 0
    for _ in range(3):
        with subprocess.Popen([sys.executable, "-c", WRITER, path, kept], stdout=subprocess.PIPE) as writer:
            writer.stdout.readline()
            for _ in range(50):
                other.write(kept / other.filename)
            assert eventually(lambda: any(p.name.startswith(".") for p in kept.iterdir()))
            assert writer.poll() is None
            writer.kill()
        asides += sum(p.name.startswith(".") for p in kept.iterdir())
        other.write(kept / other.filename)
        assert sorted(p.name for p in kept.iterdir()) == [path.name, other.filename]
        assert (kept / path.name).read_bytes() == path.read_bytes()
        assert Checkpoint.load(kept / path.name).id == job.state().id
    assert asides, "at least one was killed in the middle"


def test_a_file_that_cannot_be_written_leaves_nothing(store: Store, tmp_path: Path) -> None:
    made = store.create_job("job", model()).checkpoint()
    with pytest.raises(kvps.KvpsError, match=f"could not write checkpoint {tmp_path}/nowhere/a"):
        made.write(tmp_path / "nowhere" / "a")
    (tmp_path / "a").mkdir()
    with pytest.raises(kvps.KvpsError, match=f"could not write checkpoint {tmp_path}/a: "):
        made.write(tmp_path / "a")
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_pruning_takes_no_id_for_a_pattern(tmp_path: Path) -> None:
    ids = ("aaaaaaaa", "aaaaaaaa", "bbbbbbbb", "bbbbbbbb")
    files = [tmp_path / f"job.{id}-0000000{number % 2 + 1}.safetensors" for number, id in enumerate(ids)]
    for path in files:
        path.touch()
    prune(tmp_path, "job", "*", keep=1)
    assert all(path.exists() for path in files)
    prune(tmp_path, "job", "aaaaaaaa", keep=1)
    assert [path.exists() for path in files] == [False, True, True, True]
