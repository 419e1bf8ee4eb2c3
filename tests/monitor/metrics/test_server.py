"""The HTTP server of metrics: both formats, one path, and threads and ports that end with it."""

from __future__ import annotations

import http.client
import socket
import threading

import pytest
from helpers.experience import experienced
from helpers.harness import aggregating, await_version, gradient, model
from helpers.scrapes import HERE, OPENMETRICS, Scrape, ask, exporting
from helpers.servers import free_port
from helpers.waiting import eventually
from kvps_monitor.metrics import server
from kvps_monitor.metrics.table import TABLE
from kvps_monitor.metrics.totals import FATES
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_families

import kvps
from kvps.machine.http_server import MOST_REQUESTS, HttpServer
from kvps.store import Store


@pytest.mark.slow
def test_each_metric_of_the_table_is_there_in_both_formats(store: Store) -> None:
    job = store.create_job("j", model(), shards=2, units=9, task="digits")
    with aggregating(job), job.join("w0") as session, exporting(store) as exported:
        for _ in range(3):
            session.next_unit()
            session.push(gradient(session.pull(), 0, 0), loss=float("nan"))
        await_version(job, 3)
        job.report(3, {"loss": 0.5})
        with experienced(store, "policy"):
            pass  # what the learner has taken waits again
        wanted = {"kvps_contributions_total": 3, "kvps_evaluation": 0.5, "kvps_learner_loss": 1 / 3}
        wanted |= {f"kvps_rollouts_{fate}_total": 2 for fate in FATES}
        wanted |= {"kvps_rollouts_waiting": 3, "kvps_rollouts_taken": 0, "kvps_actors": 0}
        scrape = exported.until(kvps_units_done_total=3, kvps_shard_phase_seconds_count=45, **wanted)
        _, kind, text = ask(exported.port, accept=OPENMETRICS)
        session.leave(finished=False)
    assert kind.startswith("application/openmetrics-text")
    names = {name for spec in TABLE for name in spec.series}
    assert scrape.names() == names
    families = list(open_families(text))
    assert {sample.name for family in families for sample in family.samples} == names
    types = {family.name: family.type for family in families}
    for spec in TABLE:
        assert types[spec.name.removesuffix("_total")] == spec.type
        assert f"# HELP {spec.name.removesuffix('_total')} {spec.help}" in text
        labels = [set(s.labels) - {"le"} for f in scrape.families for s in f.samples if s.name in spec.series]
        assert all(each == set(spec.labels) for each in labels), spec.name


def test_only_one_path_and_two_methods_have_an_answer(store: Store) -> None:
    with exporting(store) as exported:
        for path in ("/", "/metrics/", "/jobs"):
            assert ask(exported.port, path) == (404, "text/plain", "there is /metrics\n")
        assert ask(exported.port, "/metrics?x=1")[0] == 200
        assert ask(exported.port, method="HEAD")[2] == ""
        for method in ("POST", "PUT", "DELETE"):
            assert ask(exported.port, method=method)[0] == 501


def test_an_address_that_cannot_be_opened_is_one_line() -> None:
    with socket.create_server((HERE, 0)) as taken:
        port = taken.getsockname()[1]
        for host in (HERE, "no.such.host.invalid", "x" * 300, "256.1.1.1"):
            wanted = rf"^--port: port {port} of {host} cannot be opened: [^\n]*$"
            with pytest.raises(kvps.KvpsError, match=wanted), server.MetricsServer("--port", host, port):
                pass


@pytest.mark.slow
def test_nothing_is_left_of_it(store: Store) -> None:
    before = set(threading.enumerate())
    clients = {client["id"] for client in store.client.call("CLIENT LIST")}
    port = free_port()
    for _ in range(2):  # the port is free again at once
        with server.MetricsServer("--port", HERE, port) as opened:
            for _ in range(2):
                with opened.serving(store, None, [].append):
                    assert Scrape.of(port).value("kvps_up") == 1
    assert eventually(lambda: set(threading.enumerate()) <= before)
    with pytest.raises(ConnectionRefusedError):
        ask(port)
    assert eventually(lambda: {client["id"] for client in store.client.call("CLIENT LIST")} <= clients)
    assert store.jobs() == [], "the store itself is open"


@pytest.mark.slow
def test_many_who_hang_keep_nobody_from_an_answer(store: Store) -> None:
    with exporting(store) as exported:
        silent = [socket.create_connection((HERE, exported.port)) for _ in range(20)]
        silent[0].sendall(b"\x00\xff\r\n\r\n")
        assert exported.scrape().value("kvps_up") == 1
        while len(silent) <= 3 * MOST_REQUESTS:
            silent.append(socket.create_connection((HERE, exported.port)))
            silent[-1].sendall(b"GET /metrics HTTP/1.1\r\nX: ")
        assert eventually(lambda: _is_answered(exported.port)), "once the threads of those that were cut off have ended"
        for _ in range(5):
            assert ask(exported.port)[0] == 200
        silent[1].settimeout(90)
        assert silent[1].recv(1) == b"", "the oldest are closed for those that come"
        assert sum(thread.name.startswith("Thread-") for thread in threading.enumerate()) <= 2 * MOST_REQUESTS
        for each in silent:
            each.close()


def _is_answered(port: int) -> bool:
    try:
        return ask(port)[0] == 200
    except (OSError, http.client.HTTPException):
        return False


def _is_open(connection: socket.socket) -> bool:
    """Send one byte, and return whether it could be sent."""
    try:
        connection.sendall(b"a")
    except OSError:
        return False
    return True


@pytest.mark.slow
def test_who_sends_a_request_byte_by_byte_is_cut_off(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with exporting(store) as exported, socket.create_connection((HERE, exported.port)) as slow:
        with monkeypatch.context() as patched:
            patched.setattr(HttpServer, "most_s", 0.5)
            assert eventually(lambda: not _is_open(slow))
        assert ask(exported.port)[0] == 200


def test_a_page_of_another_site_learns_nothing(store: Store) -> None:
    """Its owner can point a name of his at this machine."""
    with exporting(store) as exported:
        for host in ("evil.example", "evil.example:9", "localhost.evil.example", "127.0.0.1.evil.example"):
            assert ask(exported.port, host=host)[0] == 421, host
        for host in ("localhost:1", "127.0.0.1", "[::1]:80", "0.0.0.0:9", "host.docker.internal:9478", "LOCALHOST."):
            assert ask(exported.port, host=host)[0] == 200, host
