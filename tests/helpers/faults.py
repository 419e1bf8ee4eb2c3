"""Faults that tests make on purpose: servers that are killed and lose what they had not written yet, or are full."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from helpers.internals import replaced
from helpers.servers import ServerProcess

from kvps.connection.client import Client
from kvps.machine.paths import server_program
from kvps.store import Store


@contextmanager
def full_server(store: Store) -> Iterator[None]:
    """The server has no room inside the block, and the store's calls give up early."""
    store.client.call("CONFIG", "SET", "maxmemory", 1)
    try:
        with replaced(store.client, "_patience_s", 0.3):
            yield
    finally:
        store.client.call("CONFIG", "SET", "maxmemory", 0)


@contextmanager
def halted_server(client: Client) -> Iterator[None]:
    """The client's server is stopped inside the block: it takes connections, and answers nothing."""
    pid = int(client.call("INFO", "server")["process_id"])
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


class MortalServer(ServerProcess):
    """A Redis with an append-only file in `folder` that can be killed and started again in the same place."""

    def __init__(self, folder: Path, *arguments: str, fsync: str = "always") -> None:
        self.url = f"unix://{folder}/s"
        command = [server_program(), "--port", "0", "--unixsocket", f"{folder}/s", "--dir", str(folder), "--save", ""]
        command += ["--appendonly", "yes", "--appendfsync", fsync, "--auto-aof-rewrite-percentage", "0", *arguments]
        super().__init__(folder, command, unix_socket_path=f"{folder}/s")

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
