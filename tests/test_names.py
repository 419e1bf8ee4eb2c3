"""Names of jobs, workers and parts: one rule for Python and Lua, in every place where a name is a part of something."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.harness import aggregating, check_chain
from helpers.lua_sources import Sources
from helpers.waiting import eventually
from kvps_aggregator.checkpoints import Checkpoints
from kvps_monitor.loggers.event_file import EventFile, files_in
from kvps_monitor.loggers.lineage import Lineage

import kvps
from kvps import parsing
from kvps.history.checkpoint import Checkpoint
from kvps.history.checkpoint_directory import listed
from kvps.protocol import keys
from kvps.store import Store

JOB, HOST, PART = "sweep-7.kvps.lr=0.1", "gpu-1.cluster.local", "head.fc=1"
PARAMS = {"x": np.zeros(3, np.float32), "y": np.zeros(2, np.float32)}
GRADS = {name: np.ones_like(array) for name, array in PARAMS.items()}


def test_scripts_have_the_rule_of_python(raw: Any) -> None:
    names = [beside.format(chr(code)) for code in range(1, 128) for beside in ("{}", "a{}", "a{}b")]
    names += ["", "a" * 64, "a" * 65, "..", "a\N{LATIN SMALL LETTER U WITH DIAERESIS}"]
    rule = Sources("kvps.protocol").include["names"]
    loop = "local found = {} for i, name in ipairs(ARGV) do found[i] = is_name(name) and 1 or 0 end return found"
    assert raw.eval(f"{rule}\n{loop}", 0, *names) == [bool(parsing.NAME.fullmatch(name)) for name in names]


def test_a_name_with_dots_and_equals_signs_is_one_name_everywhere(store: Store, transport: str, tmp_path: Path) -> None:
    """In keys, segments, plans, the log and its file, checkpoints, and what a worker leaves and takes up again."""
    job = store.create_job(JOB, PARAMS, parts={PART: "x", "body": "y"}, transport=transport, workers=2)
    with aggregating(job, checkpoints=Checkpoints(tmp_path, 1, 1)):
        with job.join(HOST) as session, job.join(f"{HOST}.1-a") as other:
            for each in (session, other):
                each.pull(PART)
                each.push({"x": GRADS["x"]}, part=PART)
        assert eventually(lambda: job.state().version > 0 and not any(m.pending for m in job.state().members.values()))
    assert set(job.state().members) == {HOST, f"{HOST}.1-a"}
    assert job.snapshot()[1]["x"].any()
    check_chain(job, tmp_path)
    ((path, saved),) = listed(tmp_path)
    assert path.name.startswith(f"{JOB}.{job.id}-")
    assert saved
    store.remove_job(JOB)
    assert not list(store.client.scan(keys.bytes_keys(JOB)))
    again = store.restore_job(Checkpoint.load(path))
    assert {member.worker for member in again.state().members.values()} == {HOST, f"{HOST}.1-a"}


def test_event_files_tell_such_jobs_apart(store: Store, tmp_path: Path) -> None:
    job = store.create_job(JOB, PARAMS)
    EventFile(tmp_path, Lineage.of(job)).close()
    ((_, mark),) = files_in(tmp_path)
    assert mark == f"{JOB}.{job.id}"
    older = tmp_path / "events.out.tfevents.1.gpu.kvps.local.kvps.old-1.00000001.00000002"
    older.touch()
    assert "old-1.00000001" in [mark for _, mark in files_in(tmp_path)], "as earlier releases wrote it"


def test_old_names_are_opened_and_not_given_anew(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as before:  # as releases did that refused no -
        before.setattr("kvps.store.check_new_name", keys.check_name)
        before.setattr("kvps.job.check_new_name", keys.check_name)
        store.create_job("-x", PARAMS, workers=2).join("-w").leave(finished=False)
    with pytest.raises(kvps.InvalidName, match=r"job name '-y' .* for an option, because it begins with -"):
        store.create_job("-y", PARAMS)
    job = store.job("-x")
    with aggregating(job), job.join("-w") as session, job.join("w1") as other:
        for each in (session, other):
            each.pull()
            each.push(GRADS)
    with pytest.raises(kvps.InvalidName, match="worker name '-v'"):
        job.join("-v")
    assert json.loads(store.job("-x").checkpoint().workers["-w"])["rank"] == 0
    with pytest.raises(kvps.InvalidName, match="job name '-x'"):
        store.restore_job(job.checkpoint())
