"""The command: what it prints, whom it lets in, what every answer says, and how it ends."""

from __future__ import annotations

import resource
import signal
import socket
from contextlib import ExitStack, suppress
from http.cookies import SimpleCookie
from pathlib import Path

import pytest
from helpers.commands import kvps_run
from helpers.dashboards import Dashboard, dashboard
from helpers.harness import model
from helpers.waiting import eventually
from kvps_monitor.dashboard.access import HEADERS, Access

from kvps.machine.address import outward_address
from kvps.store import Store

TOKEN = "a-token-of-a-file"


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    path.chmod(0o600)
    return path


@pytest.mark.slow
def test_an_answer_has_the_headers_and_what_is_not_the_pages_own_has_none(store: Store) -> None:
    with dashboard(store.url) as shown:
        for path in ("/", "/jobs/x", "/static/main.js", "/static/nothing", "/nothing", "/api/jobs", "/api/jobs/none"):
            answer, _ = shown.ask(path)
            assert {name: answer.headers[name] for name in HEADERS} == HEADERS, path
            assert "server" not in answer.headers
        policy = shown.ask("/")[0].headers["Content-Security-Policy"] or ""
        own = {f"{what}-src 'self'" for what in ("script", "style", "connect", "img")}
        none = {f"{what} 'none'" for what in ("default-src", "base-uri", "form-action", "frame-ancestors")}
        assert set(policy.split("; ")) == own | none
        for method in ("POST", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH"):
            answer, _ = shown.ask("/api/jobs", method)
            assert (answer.status, answer.headers["Allow"]) == (405, "GET"), method
        for host in ("localhost", f"localhost:{shown.port}", "127.0.0.1:1", "LOCALHOST."):
            assert shown.ask("/api/jobs", Host=host)[0].status == 200, host
        for host in ("evil.example", f"localhost.evil.example:{shown.port}", "10.0.0.1", "", "[", "localhost@evil.com"):
            assert shown.ask("/api/jobs", Host=host)[0].status in (400, 421), host
        for host in (
            "evil.com@127.0.0.1",
            "127.0.0.1#.evil.com",
            "localhost/.evil.com",
            "localhost?x",
            "localhost:1@x",
        ):
            assert shown.ask("/api/jobs", Host=host)[0].status in (400, 421), host
        for path in ("../app.py", "%2e%2e/app.py", "..%2fapp.py", "/etc/passwd", ""):
            assert shown.ask(f"/static/{path}")[0].status == 404, path


@pytest.mark.slow
def test_other_machines_need_the_token(store: Store) -> None:
    with dashboard(store.url, "--host", "0.0.0.0") as shown:
        path, _, token = shown.url.partition("/?token=")
        assert path == f"http://{outward_address()}:{shown.port}", "a browser cannot open 0.0.0.0"
        assert len(token) >= 32
        for wrong in ("/api/jobs", "/", "/static/main.js", "/api/jobs?token=", f"/api/jobs?token={token}x"):
            assert shown.ask(wrong)[0].status == 401, wrong
        assert shown.ask("/api/jobs", Cookie=f"kvps_{shown.port}=wrong")[0].status == 401

        answer, _ = shown.ask(f"/jobs/x?a=b&token={token}")
        assert (answer.status, answer.headers["Location"]) == (303, "/jobs/x?a=b")
        cookie = SimpleCookie(answer.headers["Set-Cookie"])[f"kvps_{shown.port}"]
        assert (cookie["httponly"], cookie["samesite"].lower(), cookie["path"]) == (True, "strict", "/")
        assert shown.ask("/api/jobs", Cookie=f"{cookie.key}={cookie.value}")[0].status == 200
        assert shown.ask("/api/jobs", Authorization=f"Bearer {token}")[0].status == 200
        assert shown.ask(f"//evil.example/?token={token}")[0].headers["Location"] == "/evil.example/"
        assert shown.ask("/api/jobs", Host="192.0.2.7:80", Authorization=f"Bearer {token}")[0].status == 200
        assert shown.ask("/api/jobs", Host="evil.example", Authorization=f"Bearer {token}")[0].status == 421


@pytest.mark.slow
def test_a_token_from_a_file_is_not_printed(store: Store, token_file: Path) -> None:
    with dashboard(store.url, "--token-file", str(token_file)) as shown:
        assert TOKEN not in shown.url
        assert shown.ask("/api/jobs")[0].status == 401
        assert shown.ask("/api/jobs", Authorization=f"Bearer {TOKEN}")[0].status == 200


@pytest.mark.slow
def test_wrong_options_are_one_line(store: Store, token_file: Path) -> None:
    token_file.chmod(0o644)
    with dashboard(store.url) as shown:
        cases = {
            ("--port", str(shown.port)): (1, f"port {shown.port} of 127.0.0.1 is taken: choose another with --port"),
            ("--host", "no such name"): (2, "is no name or address of this machine"),
            ("--host", "192.0.2.1", "--port", "0"): (2, "cannot listen on port 0 of 192.0.2.1"),
            ("--token-file", str(token_file)): (2, "can be read by others: chmod 600"),
        }
        for options, (code, words) in cases.items():
            done = kvps_run("dashboard", "--redis", store.url, *options)
            assert (done.returncode, done.stdout) == (code, "")
            assert words in done.stderr
            assert done.stderr.count("\n") == 1, done.stderr
    done = kvps_run("dashboard", "--redis", "unix:///nowhere/socket")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_while_there_are_viewers(store: Store, number: int) -> None:
    store.create_job("j", model())
    with (
        dashboard(store.url) as shown,
        shown.frames("/api/jobs/j/events") as one,
        shown.frames("/api/jobs/j/events") as two,
    ):
        assert next(one)["full"]
        assert next(two)["full"]
        shown.started.process.send_signal(number)
        printed, _ = shown.started.process.communicate(timeout=120)
        assert shown.started.process.returncode == 128 + number
        assert printed == "", "no traceback"
        assert all("full" not in frame for frame in two), "its stream has ended"


@pytest.mark.slow
def test_it_writes_nothing(store: Store) -> None:
    """What it asks leaves the server's keys and its count of changes as they were."""
    store.create_job("j", model())

    def changes() -> int:
        return int(store.client.call("INFO", "persistence")["rdb_changes_since_last_save"])

    with dashboard(store.url) as shown:
        assert eventually(lambda: not store.client.call("EXISTS", "kvps:preflight"))  # it has connected
        before, keys = changes(), sorted(store.client.scan("*"))
        with shown.frames("/api/jobs/j/events") as frames:
            for _ in range(3):
                next(frames)
        for path in ("", "/j", "/j/log", "/j/spans"):
            shown.ask(f"/api/jobs{path}")
        assert (changes(), sorted(store.client.scan("*"))) == (before, keys)
        assert eventually(lambda: shown.json("/api/server")["viewers"] in ({}, {"j": 0}))


def _answers(shown: Dashboard) -> bool:
    with suppress(ConnectionError):
        return shown.ask("/api/jobs")[0].status == 200
    return False


@pytest.mark.slow
def test_connections_that_send_no_request_keep_nobody_from_an_answer(store: Store) -> None:
    """As many as uvicorn would answer with 503 for, to all."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 4_000:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4_000), hard))
    with dashboard(store.url) as shown, ExitStack() as stack:
        for _ in range(1100):
            half = stack.enter_context(socket.create_connection(("127.0.0.1", shown.port)))
            half.sendall(b"GET / HTTP/1.1\r\nX: ")
        assert eventually(lambda: _answers(shown)), "the kernel resets some while too many wait"
        assert [shown.ask("/api/jobs")[0].status for _ in range(20)] == [200] * 20


@pytest.mark.parametrize("host", ["", "0.0.0.0"])
def test_a_host_that_names_nothing_is_no_name_of_a_server_that_listens_everywhere(host: str) -> None:
    access = Access.of(host, "0.0.0.0", 5877, "token")
    assert not any(map(access.knows_name, ("", "[", "evil.com@127.0.0.1", "127.0.0.1#.evil.com")))
    assert access.knows_name("10.1.2.3:5877")
