"""Many jobs on one server: listed, served and worked on, whatever one of them is like."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
from helpers.commands import kvps_run, refused
from helpers.harness import aggregating
from helpers.waiting import eventually

from kvps.store import Store

ONE = {"x": np.ones(2, np.float32)}


@pytest.fixture(autouse=True)
def on_the_store(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands use the store's server."""
    monkeypatch.setenv("KVPS_REDIS_URL", store.url)


# -- what they wait for ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_job_that_nobody_is_in_is_not_said_to_lack_an_aggregator(store: Store) -> None:
    """It is served when a worker joins; only one that somebody is in lacks what it has not."""
    job = store.create_job("idle", ONE)

    def status() -> tuple[str, str]:
        lines = kvps_run("status", "idle").stdout.splitlines()
        return lines[0].split("  ")[1], next(line for line in lines if line.startswith("shard 0"))

    assert status() == ("waits for workers", "shard 0  idle until a worker joins")
    with job.join("w0") as session:
        assert status() == ("waits for an aggregator", "shard 0  no aggregator: kvps aggregator start")
        session.leave(finished=False)
    assert status() == ("all workers left", "shard 0  idle until a worker joins")


@pytest.mark.slow
def test_a_worker_that_waits_long_says_for_whom(store: Store, start: Any) -> None:
    assert kvps_run("create", "digits", "--job", "slow", "--workers", "2", "--data", "static").returncode == 0
    job = store.job("slow")
    worker = start("worker")
    line = worker.until("waits").splitlines()[-1]
    assert line.startswith("job slow: w0 waits: 1 of 2 workers have joined: kvps worker --job slow; ")
    assert "no aggregator holds shard 0: kvps aggregator start" in line
    with aggregating(job), job.join("w1"):
        assert worker.until("behind").splitlines()[-1] == "job slow: w0 waits: w1 is behind"


# -- jobs that cannot be read -------------------------------------------------------------------------------------


def _spoil(store: Store) -> dict[str, str]:
    """Jobs that cannot be read: name -> why."""
    wanted = {
        "newer": "optimizer 'rprop' is unknown",
        "layout": "the layout must be JSON, not '{'",
        "foreign": "WRONGTYPE",
        "finished": "worker 'w0': finished must be true or false, not 'x'",
        "id": "the id of job 'id' must be 8 hexadecimal digits, not '*'",
        "escape": r"worker 'w0': host must be printable text of at most 1024 characters, not '\x1b[2J'",
        "binary": r"version: history must be 1 to 128 letters, digits, dots and -, not '\udcff'",
    }
    jobs = {name: store.create_job(name, ONE) for name in wanted}
    store.client.call("DEL", jobs["newer"].access.keys.made_with)
    store.client.call("HSET", jobs["newer"].access.keys.config, "optimizer", '{"kind": "rprop", "lr": 0.1}')
    store.client.call("SET", jobs["layout"].access.keys.layout, "{")
    store.client.call("DEL", jobs["foreign"].access.keys.clock)
    store.client.call("SET", jobs["foreign"].access.keys.clock, "noon")
    store.client.call("HSET", jobs["id"].access.keys.version, "id", "*")
    store.client.call("HSET", jobs["binary"].access.keys.version, "history", "\udcff")
    entry = {"rank": 0, "round": 0, "accepted": 0, "incarnation": "1-a", "state": "left", "pid": 1, "device": "cpu"}
    wrong = {"finished": {"finished": "x", "host": "h"}, "escape": {"finished": True, "host": "\x1b[2J"}}
    for name, fields in wrong.items():
        store.client.call("HSET", jobs[name].access.keys.workers, "w0", json.dumps(entry | fields))
    return wanted


@pytest.mark.slow
def test_jobs_that_cannot_be_read_harm_no_other(store: Store, start: Any) -> None:
    """Each is listed with its reason, stops neither workers nor aggregators, and can be removed."""
    spoilt = _spoil(store)
    aggregator = start("aggregator", "start")
    assert kvps_run("create", "digits", "--job", "zebra", "--workers", "1", "--epochs", "1").returncode == 0
    lines = aggregator.until("job zebra")
    assert kvps_run("worker").returncode == 0
    assert eventually(lambda: store.job("zebra").state().finished(store.job("zebra").config))
    assert lines.count(" (it is tried again)") == len(spoilt), "each is set aside with its reason"
    aggregator.end()
    done = kvps_run("jobs")
    assert (done.returncode, done.stderr) == (0, "")
    rows = {line.split()[0]: line for line in done.stdout.splitlines()[1:]}
    assert list(rows) == sorted([*spoilt, "zebra"])
    assert rows["zebra"].rstrip().endswith("finished")
    listed = {one["job"]: one for one in json.loads(kvps_run("jobs", "--json").stdout)}
    for name, why in spoilt.items():
        assert re.match(rf"{name} +(- +)+unreadable: ", rows[name]), rows[name]
        assert why in rows[name]
        assert (listed[name].keys(), listed[name]["state"]) == ({"job", "state", "reason"}, "unreadable")
        assert why in listed[name]["reason"]
        if name != "escape":
            store.remove_job(name)
    words = refused("status", "escape", code=1)
    assert spoilt["escape"] in words
    assert "\x1b" not in words
    assert kvps_run("rm", "escape", "--yes").returncode == 0
    assert store.jobs() == ["zebra"]
    assert not [key for key in store.client.scan("*") if "zebra" not in key and "{" in key]
