"""The services of the compose file at work, run here: its server, and the commands of kvps, each with the user and the
password of its service."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
from helpers.commands import TINY
from helpers.compose import PASSWORDS, SERVICES, USERS, server_command, started_server
from helpers.scrapes import Scrape
from helpers.servers import free_port
from helpers.waiting import eventually
from helpers.zygote import Popen

import kvps

pytestmark = pytest.mark.slow  # it starts six processes


class Host:
    """What the engine would give to the services: a network, secrets, and a root that nobody writes to."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._port = folder, free_port()
        self.home = folder / "home"
        self.home.mkdir()

    @contextmanager
    def server(self) -> Iterator[None]:
        """Run the server on the data that it left."""
        options = f"--bind 127.0.0.1 --port {self._port}"
        server = started_server(self._folder, server_command(), options)
        try:
            assert eventually(lambda: self._answers("administrator"))
            assert all(map(self._answers, USERS))
            yield
        finally:
            server.send_signal(signal.SIGTERM)
            server.communicate(timeout=120)

    def client(self, user: str) -> redis.Redis:
        """Return a client with a user's own password."""
        name = "default" if user == "administrator" else user
        return redis.Redis("127.0.0.1", self._port, username=name, password=PASSWORDS[user])

    def _answers(self, user: str) -> bool:
        try:
            with self.client(user) as client:
                return bool(client.ping())
        except redis.ConnectionError:
            return False

    @contextmanager
    def service(self, name: str, *arguments: str) -> Iterator[Any]:
        """Run the command of a service, with these arguments too."""
        service = SERVICES[name]
        words = [*service.get("entrypoint", ["kvps"])[1:], *service["command"], *arguments]
        given = {name: self._here(value) for name, value in service["environment"].items()}
        environment = {name: value for name, value in os.environ.items() if not name.startswith("KVPS_REDIS")}
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        command = [sys.executable, "-m", "kvps", *words]
        process = Popen(command, cwd=self.home, env=environment | given | {"HOME": str(self.home)}, **streams)
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            print(f"{name}: {process.communicate(timeout=120)[0]}")

    def _here(self, value: str) -> str:
        value = re.sub(r"\$\{KVPS_NODE:-valkey\}:6379$", f"127.0.0.1:{self._port}", value)
        return value.replace("/run/secrets", str(self._folder / "secrets"))

    def store(self, user: str) -> kvps.Store:
        """Return a store with a user's own password."""
        return kvps.connect(f"redis://{user}:{PASSWORDS[user]}@127.0.0.1:{self._port}")


def test_each_service_does_its_work_with_its_own_user(tmp_path: Path) -> None:
    host, port = Host(tmp_path), free_port()
    with host.server():
        with (
            host.service("aggregator"),
            host.service("standby"),
            host.service("worker"),
            host.service("worker"),
            host.service("metrics", "--host", "127.0.0.1", "--port", str(port)) as metrics,
        ):
            with host.service("submit", "--workers", "2", "--job", "digits", *TINY) as submit:
                assert submit.wait(300) == 0
            with host.store("reader") as store:
                job = store.job("digits")
                assert eventually(lambda: job.state().finished(job.config), 300)
                made = job.state().version
            assert "metrics of all jobs" in metrics.stdout.readline()
            assert eventually(lambda: Scrape.of(port).value("kvps_versions_total", job="digits") == made)
        _check_rights(host)
    with host.server(), host.store("reader") as store:
        assert store.job("digits").snapshot()[0] == made, "a server that starts again has its users"
        _check_rights(host)
    assert not list(host.home.iterdir()), "a container's root is read-only"


def _check_rights(host: Host) -> None:
    """A worker's user writes no weights, and a reader's nothing of them."""
    with host.client("administrator") as client:
        weights = next(iter(client.scan_iter("kvps:{digits/*:w:*")))
        before = client.get(weights)
        for user in ("host", "reader"):
            with host.client(user) as theirs, pytest.raises(redis.exceptions.NoPermissionError):
                theirs.set(weights, b"x")
        assert client.get(weights) == before
