"""`kvps jobs`, `status` and `rm` on a server that outlives the commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.commands import TINY, kvps_run

pytestmark = pytest.mark.slow  # each starts whole commands


def test_a_lasting_server_and_looking_at_jobs(home: Path) -> None:
    assert kvps_run("server", "start").returncode == 0
    try:
        assert json.loads(kvps_run("server", "status", "--json").stdout).keys() == {"url", "server"}
        assert "no jobs" in kvps_run("jobs").stderr
        assert kvps_run("jobs", "--json").stdout == "[]\n"
        assert kvps_run("up", "digits", "--data", "static", *TINY).returncode == 0
        assert kvps_run("up", "digits", *TINY).returncode == 0, "a second run takes the next free name"
        assert [line.split()[0] for line in kvps_run("jobs").stdout.splitlines()[1:]] == ["digits", "digits-2"]
        exists = kvps_run("create", "digits", "--job", "digits")
        assert (exists.returncode, exists.stderr.count("\n")) == (1, 1)
        assert "kvps rm digits" in exists.stderr
        status = json.loads(kvps_run("status", "digits", "--json").stdout)
        assert status["version"] == status["clock"]["w0"] == 20
        assert status["state"] == "finished"
        member = status["members"]["w0"]
        assert (member["state"], member["round"], member["pending"], member["finished"]) == ("gone", 20, 0, True)
        assert member["loss"] > 0 < member["waiting"] < 1
        listed = json.loads(kvps_run("jobs", "--json").stdout)
        assert [one["job"] for one in listed] == ["digits", "digits-2"]
        times = {"silent_s", "age_s"}
        assert listed[0].keys() - times <= status.keys(), "one word for one thing"
        assert all(status[name] == value for name, value in listed[0].items() if name not in {*times, "optimizer"})
        assert 0 <= listed[0]["silent_s"] <= listed[0]["age_s"]
        titles, first, _ = (line.split() for line in kvps_run("jobs").stdout.splitlines())
        assert titles[3:6] == ["workers", "version", "versions/s"]
        assert first[3] == "3", "a finished job had three workers: it does not lack them"
        assert "w2" in kvps_run("status", "digits").stdout
        missing = kvps_run("status", "nothing")
        assert (missing.returncode, missing.stderr.count("\n")) == (1, 1)
        assert kvps_run("cli", "hget", "kvps:{digits}:clock", "w1").stdout == "20\n"
        assert kvps_run("rm", "digits").returncode == 2, "nobody to ask"
        assert kvps_run("rm", "digits", "--yes").returncode == 0
        assert kvps_run("rm", "digits-2", "-y").returncode == 0
        assert kvps_run("cli", "keys", "*").stdout.split() in ([], ["kvps:preflight"])
        assert kvps_run("server", "start").returncode == 1, "it runs already"
    finally:
        assert kvps_run("server", "stop").returncode == 0
    assert kvps_run("server", "status").returncode == 1
