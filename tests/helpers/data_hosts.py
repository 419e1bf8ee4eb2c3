"""Hosts of `kvps host` for tests: commands on addresses of this machine's loopback."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from helpers.clusters import node_ports
from helpers.commands import KVPS, Started

from kvps.connection.slots import Address
from kvps.server.cluster_members import Member, Members

READY = "workers: "


class DataHosts:
    """A function that starts `kvps host` at the address of a number, and the cluster that they make."""

    def __init__(self, stack: ExitStack) -> None:
        self.port = node_ports(1)[0]
        self._stack = stack

    def at(self, number: int) -> str:
        return f"127.78.3.{number}:{self.port}"

    def address(self, number: int) -> Address:
        return Address(f"127.78.3.{number}", self.port)

    def url(self, number: int = 1) -> str:
        return f"redis://{self.at(number)}"

    def start(self, number: int, *options: str, ready: bool = True) -> Started:
        """Start the host of that number; all but the first join the first. Wait until it is a part of the cluster."""
        join = () if number == 1 or "--join" in options else ("--join", self.url())
        command = [*KVPS, "host", "--listen", self.at(number), *join, *options]
        host = Started(command, os.environ | {"PYTHONUNBUFFERED": "1"})
        self._stack.callback(_end, host)
        if ready:
            host.until(READY)
        return host

    def members(self, password: str | None = None, seed: int = 1) -> list[Member]:
        """Return all masters, each as it tells itself."""
        with Members(self.address(seed), password) as members:
            return members.masters()


def _end(host: Started) -> None:
    """End a host, with all that it has started, if the test has not."""
    if host.process.poll() is None:
        host.process.terminate()
        try:
            host.process.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            host.process.kill()
            host.wait()


@contextmanager
def data_hosts() -> Iterator[DataHosts]:
    """Yield hosts, none of which runs yet. They end with the block."""
    with ExitStack() as stack:
        yield DataHosts(stack)


def processes_with(text: str) -> list[str]:
    """Return the command lines of all living processes that have a text in them."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if text in command:
                found.append(command)
    return found
