"""Scripts of many jobs in one request, and the places that their errors name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kvps
from kvps.protocol.lua_scripts import compose, evaluate, send_together
from kvps.protocol.scripts import SCRIPTS
from kvps.store import Store


def test_scripts_that_the_server_lost_are_loaded_once_for_the_whole_request(store: Store, raw: Any) -> None:
    jobs = [store.create_job(f"job{number}", {"w": np.zeros(2, np.float32)}) for number in range(20)]
    requests = [job.access.scripts.eviction() for job in jobs]
    raw.script_flush()
    raw.config_resetstat()
    commands = [request.command for request in requests]
    replies = send_together(store.client.each, store.client.call, SCRIPTS, commands)
    assert [request.parse(reply) for request, reply in zip(requests, replies, strict=True)] == [([], 0)] * 20
    stats = raw.info("commandstats")
    loads = sum(stats[name]["calls"] for name in ("cmdstat_script|load", "cmdstat_script") if name in stats)
    assert loads == len(SCRIPTS)


INCLUDE = {"more": "-- more: fails.\n\nlocal function more(value)\n  return value.more\nend\n"}


@pytest.mark.contract
@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("local a = ARGV\nreturn a.b.c", r"broken\.lua:5: attempt to index"),
        ("return more(ARGV[9])", r"include/more\.lua:4: attempt to index"),
        ("return 1 +", r"broken\.lua:\d: unexpected symbol"),
    ],
    ids=["in its own file", "in an included file", "does not compile"],
)
@pytest.mark.parametrize("keys", ["version", "version:hash"], ids=["no key has a type", "a key has a type"])
def test_an_error_of_a_script_names_file_and_line(store: Store, keys: str, body: str, why: str) -> None:
    script = compose("broken", f"-- broken: fails.\n-- KEYS {keys}\n-- USES more\n{body}\n", INCLUDE)
    command, scripts = ("EVALSHA", script.sha, 1, "a key"), {"broken": script}
    with pytest.raises(kvps.ServerError, match=why):
        evaluate(store.client.call, scripts, command)
    if "compile" not in why:
        [error] = send_together(store.client.each, store.client.call, scripts, [command])
        with pytest.raises(kvps.ServerError, match=why):
            raise error


def test_a_damaged_setting_is_refused_where_it_is_read(store: Store) -> None:
    job = store.create_job("job", {"w": np.zeros(20, np.float32)})
    store.client.call("HSET", job.access.keys.config, "staleness", "x")
    with pytest.raises(kvps.ServerError, match=r"include/staleness\.lua:\d+: attempt to compare"):
        job.access.scripts.join("w0", "n", "", {})
