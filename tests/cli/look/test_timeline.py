"""`kvps timeline`: the files that it writes, and what it refuses in one line."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from helpers.commands import kvps_run, refused
from helpers.timelines import read_perfetto, timed_job

from kvps.store import Store


@pytest.mark.slow
def test_a_file_of_each_kind(store: Store, tmp_path: Path) -> None:
    timed_job(store, staleness=1).report(6, {"loss": 0.5})
    files = {suffix: tmp_path / f"run{suffix}" for suffix in (".perfetto-trace", ".svg", ".png")}
    for path in files.values():
        done = kvps_run("timeline", "j", "-o", str(path), KVPS_REDIS_URL=store.url)
        assert (done.returncode, done.stdout) == (0, "")
        last = done.stderr.splitlines()[-1]  # before it may be progress, on a busy machine
        assert last.startswith(f"{path}: 3 workers and 1 shard, ")
        if path.suffix == ".perfetto-trace":
            assert re.search(r" versions \(1 to \d+\), 1 evaluation, [\d.]+ s$", last), "all of it"
    perfetto = read_perfetto(files[".perfetto-trace"].read_bytes())
    assert perfetto.title == "job j, SSP(1)"
    assert set(perfetto.lanes) == {"shard 0", "w0", "w1", "w2"}
    assert perfetto.flows
    assert perfetto.instants["evaluated versions"] == ["version 6: loss 0.5"]
    assert ElementTree.fromstring(files[".svg"].read_bytes()).tag.endswith("svg")
    assert files[".png"].read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_part_of_the_time(store: Store, tmp_path: Path) -> None:
    timed_job(store, rounds=8, pause_ms=20, staleness=0)

    def versions(*window: str) -> set[int]:
        path = tmp_path / "part.perfetto-trace"
        assert kvps_run("timeline", "j", "-o", str(path), *window, KVPS_REDIS_URL=store.url).returncode == 0
        return {s.facts["version"] for s in read_perfetto(path.read_bytes()).lanes["shard 0"]}

    assert versions() == set(range(1, 9))
    assert versions("--last", "0.07") < set(range(6, 9))
    assert {4, 5} <= versions("--from", "4", "--to", "5") <= {3, 4, 5}
    assert versions("--last", "1e9") == set(range(1, 9))
    said = kvps_run("timeline", "j", "-o", str(tmp_path / "part.svg"), "--to", "3", KVPS_REDIS_URL=store.url).stderr
    assert said.endswith(" s, of 24 rounds on record (--last, --from, --to)\n")


@pytest.mark.slow
def test_what_cannot_be_is_one_line(store: Store) -> None:
    timed_job(store, workers=1, rounds=2)
    store.create_job("new", {"w": np.zeros(3, np.float32)})
    for command, code, words in (
        ("j -o run.pdf", 2, "--out must end in .perfetto-trace, .svg or .png, not 'run.pdf'"),
        ("j -o run.json", 2, "--out must end in .perfetto-trace, .svg or .png, not 'run.json'"),
        ("j -o /nowhere/run.svg", 2, "--out /nowhere/run.svg: there is no directory /nowhere"),
        ("j -o run.svg --last 1 --to 2", 2, "--last and --from/--to choose two windows"),
        ("j -o run.svg --from 3 --to 2", 2, "--from 3 is after --to 2"),
        ("j -o run.svg --from 30", 2, "job j has no spans of versions from 30 on"),
        ("j -o run.svg --last 0", 2, "0.001"),
        ("j", 2, "Missing option"),
        ("none -o run.svg", 1, "no job 'none'"),
        ("new -o run.svg", 1, "job new has no spans yet"),
    ):
        assert words in refused("timeline", *command.split(), "--quiet", code=code, KVPS_REDIS_URL=store.url)
