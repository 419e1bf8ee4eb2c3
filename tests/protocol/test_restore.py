"""A job that is made of a checkpoint: for whom it waits, and what it does not keep."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvps.history.checkpoint import Checkpoint
from kvps.machine import launcher
from kvps.store import Store

pytestmark = pytest.mark.contract

ENTRIES = {
    "active": {"state": "active", "round": 3, "unit": "1", "residual": "1-n:3:r"},
    "pending": {"state": "left", "round": 4, "finished": True},
    "failed": {"state": "left", "round": 3},
    "finished": {"state": "left", "round": 3, "finished": True},
    "evicted": {"state": "evicted", "round": 4},
}
LAUNCHED = launcher.this_process("kvps run", 1)


@pytest.mark.parametrize(
    ("settings", "launched", "back", "awaited"),
    [
        ({}, False, {"active", "pending", "failed"}, True),
        ({}, True, {"active", "pending", "failed", "evicted"}, True),
        ({"units": 4}, True, {"active", "pending"}, True),
        ({"units": 4, "units_per_round": 2}, True, set(), False),
    ],
    ids=["data of their own", "all are started again", "units", "rounds of units"],
)
def test_a_restored_job_waits_for_those_that_have_work_left(
    store: Store, settings: dict[str, int], launched: bool, back: set[str], awaited: bool
) -> None:
    by = LAUNCHED if launched else ""
    common = {"incarnation": "1-n", "incarnations": 1, "nonce": "n", "accepted": 3, "finished": False}
    common |= {"host": "here", "pid": 1, "start": "", "space": "", "device": "cpu"}
    workers = {name: json.dumps(common | {"rank": i} | e) for i, (name, e) in enumerate(ENTRIES.items())}
    made = store.create_job("job", {"x": np.zeros(2, np.float32)}, workers=5, **settings).checkpoint()
    made = replace(made, config=made.config.noting(launched_by=by), workers=workers)
    made = replace(made, clock=dict.fromkeys(workers, 3), skip=dict.fromkeys(workers, 0))
    if settings:
        made = replace(made, units={"next": "3", "done": "1", "1": "active computes", "2": "pending pushed"})
    job = store.restore_job(made, "again", launched_by=by)
    members = job.state().members.values()
    assert {m.worker for m in members if m.state == "rejoining"} == back
    assert all(m.awaited == awaited for m in members if m.state == "rejoining")
    assert {m.worker for m in members if m.finished} == {"finished"}
    assert {(m.round, m.pending, m.accepted, m.residual) for m in members} == {(3, 0, 0, "")}
    if settings:
        assert job.state().units == {"next": "3", "done": "1", "1": "free", "2": "free"}


def test_a_job_that_was_suspended_goes_on_with_all_that_left_because_of_that(store: Store, tmp_path: Path) -> None:
    job = store.create_job("job", {"x": np.zeros(2, np.float32)}, workers=2, units=4)
    early, late = job.join("w0"), job.join("w1")
    early.leave(finished=True)
    job.suspend()
    late.leave(finished=False)
    job.checkpoint().write(tmp_path / "c")
    again = store.restore_job(Checkpoint.load(tmp_path / "c"), "again").state()
    assert [m.worker for m in again.members.values() if m.awaited] == ["w1"]
    assert again.run.state == "running"
