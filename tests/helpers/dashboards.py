"""The dashboard as a command, and what it answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPResponse
from typing import Any
from urllib.parse import urlsplit

from helpers.commands import KVPS, Started

SAYS = "kvps dashboard: "


@dataclass
class Dashboard:
    """A dashboard that runs. `url` is what it printed, with the token if there is one."""

    url: str
    started: Started

    @property
    def port(self) -> int:
        found = urlsplit(self.url).port
        assert found
        return found

    @property
    def root(self) -> str:
        """The URL to append a path to, by the address of this machine."""
        return f"http://127.0.0.1:{self.port}"

    def ask(self, path: str, method: str = "GET", **headers: str) -> tuple[HTTPResponse, str]:
        """Return the answer to a request, and its body."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, headers={"Host": f"127.0.0.1:{self.port}"} | headers)
            answer = connection.getresponse()
            return answer, answer.read().decode()
        finally:
            connection.close()

    def json(self, path: str) -> Any:
        """Return what the API answers."""
        answer, body = self.ask(path)
        assert answer.status == 200, body
        return json.loads(body)

    @contextmanager
    def frames(self, path: str) -> Iterator[Iterator[dict[str, Any]]]:
        """The frames of a stream, as they come."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("GET", path)
        answer = connection.getresponse()
        assert answer.status == 200

        def come() -> Iterator[dict[str, Any]]:
            for line in answer:
                if line.startswith(b"data: "):
                    yield json.loads(line.removeprefix(b"data: "))

        try:
            yield come()
        finally:
            answer.close()
            connection.close()


@contextmanager
def dashboard(redis: str, *options: str) -> Iterator[Dashboard]:
    """A dashboard of the server at this URL, on any free port."""
    started = Started([*KVPS, "dashboard", "--port", "0", "--redis", redis, *options])
    try:
        line = started.until(SAYS).splitlines()[-1]
        yield Dashboard(line.removeprefix(SAYS), started)
    finally:
        if started.process.poll() is None:
            started.end()
