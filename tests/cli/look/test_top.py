"""`kvps top` as a command: one look agrees with what redis-cli answers; on a terminal it ends as it should."""

from __future__ import annotations

import json
import signal
import subprocess

import pytest
from helpers.commands import KVPS, kvps_run, refused
from helpers.harness import aggregating, gradient, model
from helpers.internals import abandon, fall_silent
from helpers.paths import program_on_path
from helpers.terminals import on_a_terminal
from helpers.waiting import eventually
from kvps_cli.serve.server import client_arguments

from kvps.job import Job
from kvps.store import Store

pytestmark = pytest.mark.usefixtures("forked")

LONG = {"worker_timeout_ms": 86_400_000, "lease_ms": 86_400_000}


def top(store: Store, *arguments: str) -> str:
    done = kvps_run("top", *arguments, KVPS_REDIS_URL=store.url)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def redis_cli(store: Store, *command: object) -> list[str]:
    """The lines that redis-cli prints."""
    program = [program_on_path("redis-cli"), *client_arguments(store.url)[0], *map(str, command)]
    return subprocess.run(program, capture_output=True, text=True, check=True).stdout.splitlines()


def held_still(store: Store) -> Job:
    """A job of two shards: w0 is a round ahead of w1, its contribution waits, and nobody does anything."""
    job = store.create_job("j", model(), workers=2, shards=2, staleness=1, **LONG)
    sessions = [job.join(f"w{n}") for n in range(2)]
    with aggregating(job):
        for round_ in range(3):
            for session in sessions:
                session.push(gradient(session.pull(), session.rank, round_), loss=1 / (1 + round_))
        assert eventually(lambda: sum(job.state().clock.values()) == 6)
    sessions[0].push(gradient(sessions[0].pull(), 0, 3), loss=0.125)
    for session in sessions:
        fall_silent(session)
        abandon(session)
        long_ago = round(1000 * job.access.server.seconds()) - 60_000
        job.access.client.call("ZADD", job.access.keys.heartbeat, long_ago, session.worker)
    job.access.scripts.acquire(0, "somebody:1:2:abcdef", 86_400_000, "n1")
    return job


def server_ms(store: Store) -> float:
    seconds, microseconds = map(int, redis_cli(store, "TIME"))
    return 1000 * seconds + microseconds / 1000


def pairs(found: list[str]) -> dict[str, int]:
    return {name: int(value) for name, value in zip(found[::2], found[1::2], strict=True)}


@pytest.mark.slow
def test_one_look_agrees_with_redis_cli(store: Store) -> None:
    job = held_still(store)
    keys = job.access.keys
    before = server_ms(store)
    view = json.loads(top(store, "--once", "--json"))
    after = server_ms(store)
    workers = {w["worker"]: w for w in view["workers"]}
    assert [str(view["version"])] == redis_cli(store, "HGET", keys.version, "version")
    assert [view["head"]] == redis_cli(store, "HGET", keys.version, "head")
    assert [str(view["backlog"])] == redis_cli(store, "XLEN", keys.inbox) == ["1"]
    clocks = pairs(redis_cli(store, "HGETALL", keys.clock))
    assert {name: w["clock"] for name, w in workers.items()} == clocks == {"w0": 3, "w1": 3}
    assert view["contributions"] == sum(clocks.values())
    for name, w in workers.items():
        assert [str(w["committed"])] == redis_cli(store, "ZSCORE", keys.rounds, name)
        assert [str(w["pushed"])] == redis_cli(store, "ZSCORE", keys.pushed, name)
        beat = float(redis_cli(store, "ZSCORE", keys.heartbeat, name)[0])
        assert before - beat <= 1000 * w["silent_s"] <= after - beat
    assert (workers["w0"]["ahead"], workers["w1"]["behind"]) == (1, 1)
    assert [view["shards"][0]["holder"]] == redis_cli(store, "GET", keys.lease(0)) == ["somebody:1:2:abcdef"]
    assert [view["shards"][1]["holder"]] == redis_cli(store, "GET", keys.lease(1)) == [""]
    for name, w in workers.items():
        entry = redis_cli(store, "XREVRANGE", keys.trace(name), "+", "-", "COUNT", 1)
        assert float(entry[entry.index("loss") + 1]) == w["loss"] > 0
    assert before - 1 <= view["at_ms"] <= after


@pytest.mark.slow
def test_once_prints_a_table(store: Store) -> None:
    job = held_still(store)
    lines = top(store, "j", "--once").splitlines()
    assert lines[0].split("  ")[:3] == ["j", "stalled: waits for w1, w0", "SSP(1)"]
    assert lines[1].startswith(f"version {job.state().version}  ")
    assert "backlog 1" in lines[1]
    titles = next(line for line in lines if line.startswith("worker"))
    assert titles.split()[-2:] == ["loss", "curve"], "all columns are there where there is no terminal"
    assert {line.split()[0] for line in lines if line.startswith("w") and line != titles} == {"w0", "w1"}
    assert any(line.split()[:2] == ["0", "somebody:1"] for line in lines)
    assert any(line.split()[:2] == ["1", "nobody"] for line in lines)
    first, second = (json.loads(top(store, "j", *options)) for options in (["--json"], ["--json", "--once"]))
    assert first.keys() == second.keys()
    for name in ("job", "version", "head", "backlog", "contributions"):
        assert first[name] == second[name]


@pytest.mark.slow
def test_a_job_without_workers(store: Store) -> None:
    store.create_job("j", model(), workers=2)
    assert "no worker has joined" in top(store, "--once").splitlines()
    assert json.loads(top(store, "--json"))["workers"] == []


@pytest.mark.slow
def test_without_a_name_there_must_be_one_job(store: Store) -> None:
    where = {"KVPS_REDIS_URL": store.url}
    none = "no jobs are on this server: start one with kvps up digits or kvps create TASK --job NAME"
    assert refused("top", "--once", code=1, **where) == none
    for name in ("a", "b"):
        store.create_job(name, model(), workers=2)
    several = "this server has several jobs (a, b): say which, as kvps top a"
    assert refused("top", "--json", **where) == several
    assert "'c'" in refused("top", "c", "--once", code=1, **where)
    words = "kvps top draws on a terminal, and here is none: give --once or --json"
    assert refused("top", "a", **where) == words


# -- on a terminal ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("key", ["q", "\x03", ""], ids=["q", "Ctrl-C", "SIGTERM"])
def test_a_key_or_a_signal_ends_it_and_leaves_the_terminal_as_it_was(store: Store, key: str) -> None:
    store.create_job("j", model(), workers=2, staleness=3)
    with on_a_terminal([*KVPS, "top"], KVPS_REDIS_URL=store.url) as terminal:
        terminal.until("SSP(3)")
        if key:
            terminal.press(key)
        else:
            terminal.process.send_signal(signal.SIGTERM)
        assert terminal.end() == (0 if key else 128 + signal.SIGTERM)
        assert "\x1b[?1049l" in terminal.output.rpartition("SSP(3)")[2], "it leaves the alternate screen"
        assert "Traceback" not in terminal.output


@pytest.mark.slow
def test_it_ends_with_its_terminal(store: Store) -> None:
    """It would spin, and no signal would end it."""
    store.create_job("j", model(), staleness=3, workers=1)
    with on_a_terminal([*KVPS, "top"], KVPS_REDIS_URL=store.url) as terminal:
        terminal.until("SSP(3)")
        assert terminal.vanish() == 128 + signal.SIGHUP


def test_a_job_that_is_not_there_is_an_error_at_once(store: Store) -> None:
    with on_a_terminal([*KVPS, "top", "nowhere"], KVPS_REDIS_URL=store.url) as terminal:
        assert terminal.end() == 1
        assert terminal.output.startswith("kvps: error: ")
