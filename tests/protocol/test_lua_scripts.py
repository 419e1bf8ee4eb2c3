"""Scripts of many jobs in one request."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvps.protocol.lua_scripts import send_together
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
