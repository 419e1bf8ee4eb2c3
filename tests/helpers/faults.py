"""Faults that tests make on purpose: servers that are killed and lose what they had not written yet, or are full."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis

from kvps.connection.client import Client
from kvps.machine.paths import server_program
from kvps.store import Store


@contextmanager
def full_server(store: Store) -> Iterator[None]:
    """The server has no room inside the block, and the store's calls give up early."""
    patience, store.client._patience_s = store.client._patience_s, 0.3
    store.client.call("CONFIG", "SET", "maxmemory", 1)
    try:
        yield
    finally:
        store.client.call("CONFIG", "SET", "maxmemory", 0)
        store.client._patience_s = patience


@contextmanager
def halted_server(client: Client) -> Iterator[None]:
    """The client's server is stopped inside the block: it takes connections, and answers nothing."""
    pid = int(client.call("INFO", "server")["process_id"])
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


class MortalServer:
    """A Redis with an append-only file in `folder` that can be killed and started again in the same place."""

    def __init__(self, folder: Path, *arguments: str, fsync: str = "always") -> None:
        self.url = f"unix://{folder}/s"
        self.folder = folder
        self._command = [server_program(), "--port", "0", "--unixsocket", f"{folder}/s", "--dir", str(folder)]
        self._command += ["--save", "", "--logfile", f"{folder}/log", "--appendonly", "yes", "--appendfsync", fsync]
        self._command += ["--auto-aof-rewrite-percentage", "0", *arguments]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *options: str) -> None:
        """Start the server, with more `options` for this once. Raises RuntimeError if it ends at once."""
        self._process = subprocess.Popen(
            [*self._command, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, process_group=0
        )
        with redis.Redis(unix_socket_path=f"{self.folder}/s", retry=None, protocol=2) as client:
            for _ in range(2000):
                try:
                    client.ping()
                    return
                except redis.exceptions.ConnectionError:  # also while it loads its file
                    if self._process.poll() is not None:
                        raise RuntimeError(f"{self._command} ended with {self._process.returncode}") from None
                    time.sleep(0.005)  # a starting server gives no sign but its socket
        raise RuntimeError("the server did not start")

    def kill(self) -> None:
        """Send SIGKILL, also to a process that writes the file anew: what the server had handed to the kernel is in its
        file, the rest is lost."""
        assert self._process
        if self._process.returncode is None:  # its number is still its own
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def said(self) -> str:
        """Return the server's log output."""
        return (self.folder / "log").read_text()

    def log(self) -> Path:
        """Return the file that the server appends to. Redis 7 and Valkey keep several, of which the last grows."""
        parts = sorted(self.folder.glob("appendonlydir/*.incr.aof"))
        return parts[-1] if parts else self.folder / "appendonly.aof"

    def files(self) -> dict[Path, bytes]:
        """Return all append-only files of a dead server."""
        return {path: path.read_bytes() for path in self.folder.rglob("*aof*") if path.is_file()}

    def restore(self, files: dict[Path, bytes], length: int) -> None:
        """Put a dead server's files back as they were, the growing one cut to `length` bytes."""
        for path in self.files().keys() - files.keys():
            path.unlink()
        for path, content in files.items():
            path.write_bytes(content)
        with self.log().open("r+b") as file:
            file.truncate(length)

    def __enter__(self) -> MortalServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
