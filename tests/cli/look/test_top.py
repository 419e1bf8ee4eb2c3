"""`kvps top` as a command: as text, as JSON, and on a terminal, where it ends as it should."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable

import pytest
from helpers.commands import KVPS, refused
from helpers.harness import aggregating, gradient, model
from helpers.internals import abandon, fall_silent
from helpers.terminals import on_a_terminal
from helpers.waiting import eventually

from kvps.job import Job
from kvps.store import Store

pytestmark = pytest.mark.usefixtures("forked")

LONG = {"worker_timeout_ms": 86_400_000, "lease_ms": 86_400_000}


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


@pytest.mark.slow
def test_once_prints_a_table(store: Store, printed: Callable[..., str]) -> None:
    where = {"KVPS_REDIS_URL": store.url}
    job = held_still(store)
    lines = printed("top", "j", "--once", **where).splitlines()
    assert lines[0].split("  ")[:3] == ["j", "stalled: waits for w1, w0", "SSP(1)"]
    assert lines[1].startswith(f"version {job.state().version}  ")
    assert "backlog 1" in lines[1]
    titles = next(line for line in lines if line.startswith("worker"))
    assert titles.split()[-2:] == ["loss", "curve"], "all columns are there where there is no terminal"
    assert {line.split()[0] for line in lines if line.startswith("w") and line != titles} == {"w0", "w1"}
    assert any(line.split()[:2] == ["0", "somebody:1"] for line in lines)
    assert any(line.split()[:2] == ["1", "nobody"] for line in lines)
    view = json.loads(printed("top", "--json", **where))
    assert (view["job"], view["version"], view["backlog"]) == ("j", job.state().version, 1)
    store.remove_job("j")
    store.create_job("j", model(), workers=2)
    assert "no worker has joined" in printed("top", "--once", **where).splitlines()


@pytest.mark.slow
def test_without_a_name_there_must_be_one_job(store: Store, printed: Callable[..., str]) -> None:
    where = {"KVPS_REDIS_URL": store.url}
    none = "no jobs are on this server: start one with kvps up digits or kvps create TASK --job NAME"
    assert refused("top", "--once", code=1, **where) == none
    store.create_job("a", model(), workers=2)
    for command in (["status"], ["log"], ["inspect"], ["verify"], ["top", "--once"]):
        assert printed(*command, **where) == printed(*command[:1], "a", *command[1:], **where)
    store.create_job("b", model(), workers=2)
    several = "this server has several jobs (a, b): say which one"
    for command in (["top", "--json"], ["status"], ["log"], ["inspect"], ["verify"]):
        assert refused(*command, **where) == several
    assert "'c'" in refused("top", "c", "--once", code=1, **where)
    words = "kvps top draws on a terminal, and here is none: give --once or --json"
    assert refused("top", "a", **where) == words


# -- on a terminal ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("key", ["q", ""], ids=["q", "SIGTERM"])
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
