"""Waits for the effects of other processes, and searches for what they leave."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from kvps.job import Job
from kvps.protocol.keys import JobKeys
from kvps.store import Store


def eventually(holds: Callable[[], bool], seconds: float = 90) -> bool:
    """Return whether `holds()` comes true: for effects of other processes, which give no sign to wait for."""
    deadline = time.monotonic() + seconds
    while not (held := holds()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return held


def awaited_job(store: Store, name: str, version: int = 0) -> Job:
    """Return the job of that name, as soon as another process has made it and it has come to a version."""
    assert eventually(lambda: store.client.call("EXISTS", JobKeys(name).config))
    job = store.job(name)
    assert eventually(lambda: job.state().version >= version)
    return job


def processes_of(home: Path) -> list[str]:
    """Return the command lines of all living processes that were started with this runtime directory, but this one."""
    return list(pids_of(home).values())


def pids_of(home: Path) -> dict[int, str]:
    """Return the same processes: process id -> command line."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with suppress(OSError):
            alive = (entry / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
            command = (entry / "cmdline").read_text().rstrip("\0").replace("\0", " ")
            mine = f"KVPS_RUNTIME_DIR={home}".encode() in (entry / "environ").read_bytes().split(b"\0")
            if alive and (mine or f"{home}/redis.sock" in command):  # Redis writes its title over its environment
                found[int(entry.name)] = command
    return found


def command_lines_with(text: str) -> list[str]:
    """Return the command lines of all processes that have a text in them."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            command = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if text in command:
                found.append(command)
    return found
