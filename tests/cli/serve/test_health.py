"""`kvps aggregator start --health-port`: what probes are answered while Redis works, hangs, and works again."""

from __future__ import annotations

import http.client
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from helpers.commands import refused
from helpers.faults import halted_server
from helpers.servers import free_port
from helpers.waiting import eventually
from kvps_cli.options import LOOPBACK
from kvps_cli.serve import health

from kvps.store import Store

HERE = LOOPBACK


def ask(port: int, path: str, method: str = "GET", host: str = HERE) -> tuple[int, str]:
    """The status and the text of one answer."""
    connection = http.client.HTTPConnection(host, port, timeout=60)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


@contextmanager
def answering(last_turn: Callable[[], float], host: str = HERE) -> Iterator[int]:
    """Probes are answered inside the block, on the port that it gets."""
    port = free_port()
    with health.Probes("--health-port", host, port) as probes:
        probes.begin(last_turn)
        yield port


@pytest.mark.slow
def test_the_command_answers_probes_until_it_ends(store: Store, start: Any) -> None:
    port = free_port()
    serving = start("aggregator", "start", "--redis", store.url, "--health-port", str(port))
    serving.until("serving every job")
    assert eventually(lambda: ask(port, "/ready") == (200, "ready\n"))
    assert ask(port, "/live") == (200, "live\n")
    with halted_server(store.client):
        assert eventually(lambda: ask(port, "/ready")[0] == 503)
        assert ask(port, "/live")[0] == 200
    assert eventually(lambda: ask(port, "/ready")[0] == 200)
    assert serving.end() == 128 + signal.SIGTERM
    with pytest.raises(ConnectionRefusedError):
        ask(port, "/live")


def test_only_two_paths_and_two_methods_have_an_answer() -> None:
    with answering(time.monotonic) as port:
        for path in ("/", "/live/", "/ready?jobs", "/metrics"):
            assert ask(port, path) == (404, "there are /live and /ready\n")
        assert ask(port, "/live", "HEAD") == (200, "")
        for method in ("POST", "PUT", "DELETE", "OPTIONS"):
            assert ask(port, "/live", method)[0] == 501
    with answering(lambda: time.monotonic() - 7) as port:
        assert ask(port, "/ready") == (503, "no answer from Redis for 7 s\n")
        assert ask(port, "/ready", "HEAD") == (503, "")
        assert ask(port, "/live")[0] == 200, "a short silence of Redis is no hang of the loop"
    with answering(lambda: time.monotonic() - 79) as port:
        assert ask(port, "/live")[0] == 200, "the loop waits for Redis for a minute"
    with answering(lambda: time.monotonic() - 81) as port:
        assert ask(port, "/live") == (503, "no turn of the loop for 81 s\n")


@pytest.mark.slow
def test_nobody_who_hangs_keeps_others_from_an_answer(capsys: pytest.CaptureFixture[str]) -> None:
    with answering(time.monotonic) as port:
        silent = [socket.create_connection((HERE, port)) for _ in range(20)]
        assert ask(port, "/live") == (200, "live\n")
        silent[0].sendall(b"\x00\xff\r\n\r\n")
        silent[1].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # it closes with a reset
        for each in silent:
            each.close()
        assert ask(port, "/live") == (200, "live\n")
    assert capsys.readouterr() == ("", "")


def test_an_answer_names_no_version_of_anything() -> None:
    with answering(time.monotonic) as port, socket.create_connection((HERE, port)) as probe:
        probe.sendall(b"GET /live HTTP/1.0\r\n\r\n")
        head = probe.makefile("rb").read().decode().partition("\r\n\r\n")[0].splitlines()
    assert {line.partition(":")[0] for line in head[1:]} == {"Server", "Date", "Content-Type", "Content-Length"}
    assert "Server: kvps" in head


@pytest.mark.slow
def test_a_port_that_cannot_be_had_gets_one_line(store: Store) -> None:
    with socket.create_server((HERE, 0)) as other:
        port = other.getsockname()[1]
        line = refused("aggregator", "start", "--redis", store.url, "--health-port", str(port), code=1)
    assert line.startswith(f"--health-port: port {port} of {HERE} cannot be opened: ")
    for wrong, words in (
        ("--job one --health-port 1", "--health-port is for an aggregator that serves every job: leave out --job"),
        ("--health-port 65536", "--health-port"),
        (f"--health-host {HERE}", "--health-host is the address of --health-port: give that too"),
    ):
        assert words in refused("aggregator", "start", "--redis", store.url, *wrong.split())
