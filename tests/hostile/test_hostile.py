"""Whatever a hostile writer puts into a job's keys or files, each reader refuses it in one line, or reads on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from helpers.paths import ROOT

from hostile.readers import READERS
from hostile.scene import SCENES, GaveUp, scene

pytestmark = pytest.mark.usefixtures("forked")


def _fuzz(mutations: int, processes: int) -> None:
    """Run mutations in processes of their own: they limit their memory, and end readers with a signal."""
    options = ["--mutations", str(mutations), "--processes", str(processes), "--seed", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "hostile", *options], cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr[-10_000:]
    assert f"{mutations} mutations" in done.stdout


def test_readers_refuse_what_a_hostile_writer_wrote() -> None:
    _fuzz(20, processes=1)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_readers_refuse_many_things_that_a_hostile_writer_wrote() -> None:
    _fuzz(50 * len(SCENES), processes=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENES)
def test_what_nobody_has_changed_can_be_read(server_url: str, tmp_path: Path, name: str) -> None:
    """Else a reader that refuses everything would pass."""
    with scene(name, server_url, tmp_path / "files") as found:
        before = found.digest()
        for reader in READERS.values():
            if reader.of in ("keys", "files", name):
                try:
                    reader.run(found, found.opened)
                except GaveUp:
                    assert reader.of == "keys", "only who waits for others gives up"
                assert reader.writes or not found.changed(before, found.digest())
                found.restore()
        assert not found.changed(before, found.digest())


@pytest.mark.slow
@pytest.mark.parametrize("options", [["--minutes", "0.1", "--turn", "5"], ["--full"]])
def test_honest_jobs_train_with_the_same_bits_beside_a_hostile_one(options: list[str]) -> None:
    done = subprocess.run([sys.executable, "-m", "hostile.beside", *options], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-5_000:]
    assert "are those of a plain loop, bit for bit" in done.stdout
