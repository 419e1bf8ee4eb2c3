"""Hosts for tests, made of the kernel's namespaces, and commands of kvps that run on them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from helpers.commands import KVPS, Started
from helpers.servers import private_directory
from kvps_bench.hosts import Host, Network, NoHosts

import kvps

_JOIN = "join from elsewhere: KVPS_REDIS_URL="


@contextmanager
def network(number: int, bits_per_s: float = 0) -> Iterator[Hosts]:
    """Yield this many hosts that reach each other; skip the test where hosts may not be made."""
    try:
        made = Network(number, bits_per_s)
    except NoHosts as why:
        pytest.skip(str(why))
    with private_directory() as folder, made as hosts:
        yield Hosts(hosts, folder)


class Hosts:
    """The hosts of a test. Once `serve` has been called, all commands use that server."""

    def __init__(self, hosts: Sequence[Host], folder: Path) -> None:
        self.url = ""
        self._hosts, self._folder = hosts, folder

    def __getitem__(self, number: int) -> Host:
        return self._hosts[number]

    @contextmanager
    def serve(self, number: int, listen: str) -> Iterator[kvps.Store]:
        """Start a private server on a host, to stay until the host ends. `url` is what it tells others to use.

        Yield a store on its Unix socket, through which the test looks on from beside the network.
        """
        home = self._home(number)
        command = [*self[number].entering(), *KVPS, "server", "start", "--listen", listen]
        done = subprocess.run(command, env=self._environment(number), capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        [line] = [line for line in done.stderr.splitlines() if line.startswith(_JOIN)]
        self.url = line.removeprefix(_JOIN).removesuffix(" kvps worker")
        with kvps.connect((home / "url").read_text().splitlines()[0]) as store:
            yield store

    def start(self, number: int, *arguments: str, through: Sequence[str] = ()) -> Started:
        """Start a command of kvps on a host, `through` another command if one is given; it ends with the host."""
        return self.popen(number, *through, *KVPS, *arguments)

    def popen(self, number: int, *command: str) -> Started:
        """Start any command on a host; it ends with the host."""
        return Started([*self[number].entering(), *command], self._environment(number))

    def _home(self, number: int) -> Path:
        home = self._folder / str(number)
        home.mkdir(exist_ok=True, mode=0o700)
        return home

    def _environment(self, number: int) -> dict[str, str]:
        own = {"KVPS_RUNTIME_DIR": str(self._home(number))} | ({"KVPS_REDIS_URL": self.url} if self.url else {})
        return {name: value for name, value in os.environ.items() if name != "KVPS_REDIS_URL"} | own
