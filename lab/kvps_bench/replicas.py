"""Replicas of the benchmark's own server, on this machine."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from kvps.connection.client import Client
from kvps.connection.sockets import connection_settings
from kvps.errors import NoServer
from kvps.machine.paths import server_program
from kvps_bench.crew import free_port

_FOLLOW_S = 60.0
_LOOK_S = 0.05


@contextmanager
def running_replicas(url: str, count: int) -> Iterator[None]:
    """Start replicas of the server at `url`, and end them after the block. Raises NoServer if they do not follow it."""
    settings = connection_settings(url)
    with ExitStack() as stack:
        for _ in range(count):
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvps-bench-"))
            stack.callback(_end, _started(Path(folder), settings["port"], settings["password"]))
        client = stack.enter_context(Client(url))
        deadline = time.monotonic() + _FOLLOW_S
        while _following(client) < count:
            if time.monotonic() > deadline:
                raise NoServer(f"{count} replicas were started, and do not follow their server after {_FOLLOW_S:g} s")
            time.sleep(_LOOK_S)
        yield


def _started(folder: Path, port: int, password: str) -> subprocess.Popen[bytes]:
    lines = {
        "bind": "127.0.0.1",
        "port": free_port(),
        "dir": f'"{folder}"',
        "save": '""',
        "replicaof": f"127.0.0.1 {port}",
        "masterauth": password,
        "requirepass": password,
    }
    quiet = subprocess.DEVNULL
    replica = subprocess.Popen([server_program(), "-"], stdin=subprocess.PIPE, stdout=quiet, stderr=quiet)
    assert replica.stdin
    replica.stdin.write("".join(f"{name} {value}\n" for name, value in lines.items()).encode())
    replica.stdin.close()
    return replica


def _following(client: Client) -> int:
    info = client.call("INFO", "replication")
    return sum(isinstance(row, dict) and row.get("state") == "online" for row in info.values())


def _end(replica: subprocess.Popen[bytes]) -> None:
    replica.kill()
    replica.wait()
