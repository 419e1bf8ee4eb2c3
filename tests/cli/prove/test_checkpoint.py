"""Checkpoints as a user meets them: kvps up, kvps checkpoint, kvps verify."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.checkpoints import PATIENT, bits, train_to
from helpers.commands import kvps_run, refused
from helpers.harness import check_chain, model

from kvps.store import Store

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked")]  # each starts whole commands


def _said(*arguments: str) -> str:
    done = kvps_run(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_up_writes_checkpoints_and_what_is_restored_ends_the_same(lasting: Store) -> None:
    said = _said("up", "digits", "--job", "job", "--checkpoint-every", "100", "--report", "whole.json")
    assert re.search(r"^the weights are in (\S+/checkpoints): kvps checkpoint ls \1$", said, re.MULTILINE)
    job, folder = lasting.job("job"), Path("checkpoints")
    version = job.state().version
    files = sorted(p.name for p in folder.glob("*.safetensors"))
    assert len(files) == 3
    assert files[-1] == f"job.{job.state().id}-{version:08d}.safetensors", "the last version too"
    rows = _said("checkpoint", "ls").splitlines()
    assert [row.split()[0] for row in rows] == ["file", *files]
    assert all(row.split()[-1] == "ok" and " BSP " in row for row in rows[1:])
    assert f"recomputed  {version} of {version} commits bit-identical" in _said(
        "verify", "job", "--checkpoints", "checkpoints"
    )
    assert "give --checkpoints DIR" in _said("verify", "job")
    said = _said("checkpoint", "restore", str(folder / files[0]), "--job", "again", "--shards", "2")
    assert "job again: continues from version" in said
    assert "waits for" not in said, "in rounds of units any workers reach the same bits: here two instead of three"
    parts = [["aggregator", "start", "--job", "again"], *(["worker", "--job", "again"] for _ in range(2))]
    started = [subprocess.Popen([sys.executable, "-m", "kvps", *part, "--quiet"]) for part in parts]
    assert [each.wait(120) for each in started] == [0] * 3
    assert bits(lasting.job("again")) == bits(job)
    verified = _said("verify", "again", "--from", str(folder / files[0]))
    since = lasting.job("again").state().begin.version
    assert f"recomputed  {version - since} of {version - since} commits after version {since} bit-identical" in verified
    assert f"chain       {version - since} commits after version {since}" in _said("verify", "again")


def test_by_hand(lasting: Store, tmp_path: Path) -> None:
    job = lasting.create_job("job", model(), **PATIENT)
    train_to(job, 3, 1)
    assert "no checkpoints in" in _said("checkpoint", "ls", str(tmp_path))
    assert "job job: version 3 in" in _said("checkpoint", "save", "job", "--to", "here")
    assert "job job: version 3 in" in _said("checkpoint", "save", "job", "--to", "here/mine.safetensors")
    with job.join("w0"):
        assert "version 3" in _said("checkpoint", "save", "job", "--to", "there/at-work.safetensors")
    said = _said("checkpoint", "restore", "there/at-work.safetensors", "--job", "made-in-python")
    assert said.endswith("; waits for w0: start its own script, which joins with job.join('w0')\n"), "no kvps worker"
    assert check_chain(job, Path("here")) == 3
    bad = bytearray(Path("here/mine.safetensors").read_bytes())
    bad[-1] ^= 1
    Path("here/bad.safetensors").write_bytes(bad)
    states = {row.split()[0]: row.split()[-1] for row in _said("checkpoint", "ls", "here").splitlines()[1:]}
    assert states == {
        "bad.safetensors": "damaged",
        "mine.safetensors": "ok",
        f"job.{job.state().id}-00000003.safetensors": "ok",
    }
    listed = {one["file"]: one for one in json.loads(_said("checkpoint", "ls", "here", "--json"))}
    assert {name: one["state"] for name, one in listed.items()} == states
    assert (listed["mine.safetensors"]["job"], listed["mine.safetensors"]["version"]) == ("job", 3)
    assert listed["bad.safetensors"]["bytes"] == len(bad)
    assert listed["bad.safetensors"]["version"] is None
    for arguments, code, words in [
        (["checkpoint", "restore", "here/bad.safetensors"], 1, "here/bad.safetensors is damaged"),
        (["checkpoint", "restore", "here/none.safetensors"], 2, "there is no checkpoint here/none.safetensors"),
        (["checkpoint", "restore", "here"], 2, "here is a directory: give --job too"),
        (["checkpoint", "restore", "here/mine.safetensors"], 1, "job 'job' exists"),
        (["checkpoint", "restore", "here/mine.safetensors", "--job", "a b"], 2, "job name 'a b'"),
        (["checkpoint", "restore", "here/mine.safetensors", "--job", "b", "--shards", "0"], 2, "shards must be"),
        (["checkpoint", "save", "none"], 1, "no job 'none'"),
        (["checkpoint", "save", "job", "--to", "/proc/none"], 2, "--to /proc/none"),
        (["checkpoint", "ls", "nowhere"], 2, "there is no directory nowhere"),
        (["aggregator", "start", "--checkpoint-every", "0"], 2, "Invalid value for '--checkpoint-every'"),
        (["aggregator", "start", "--checkpoint-every", "5", "--keep", "0"], 2, "Invalid value for '--keep'"),
        (["up", "digits", "--kill-every", "1", "--log-keep", "9"], 2, "give --checkpoints DIR too, or leave out --log"),
        (["up", "digits", "--checkpoint-every", "5", "--checkpoints", "/proc/x"], 2, "--checkpoints /proc/x"),
        (["verify", "job", "-q", "--from", "here/bad.safetensors"], 1, "here/bad.safetensors is damaged"),
    ]:
        assert words in refused(*arguments, code=code)
