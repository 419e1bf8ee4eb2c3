"""`kvps metrics`, and `--metrics-port` of the aggregator and the worker: real commands, scraped while they run."""

from __future__ import annotations

import signal
import socket
from typing import Any

import pytest
from helpers.commands import refused
from helpers.digits_job import digits_job
from helpers.harness import aggregating, await_version, gradient, model
from helpers.scrapes import HERE, Scrape, ask
from helpers.servers import free_port
from helpers.waiting import eventually

from kvps.store import Store


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((HERE, port)) == 0


@pytest.mark.slow
def test_the_command_serves_all_jobs_until_it_is_ended(store: Store, start: Any) -> None:
    jobs = [store.create_job(name, model()) for name in ("a", "b")]
    for job in jobs:
        with aggregating(job), job.join("w0") as session:
            session.push(gradient(session.pull(), 0, 0))
            await_version(job, 1)
    port = free_port()
    serving = start("metrics", "--port", str(port), "--redis", store.url)
    line = serving.until("metrics of all jobs at http://127.0.0.1")
    assert ask(port, line.partition(f":{port}")[2].partition(";")[0])[0] == 200, "at the path that the command names"
    scrape = Scrape.of(port)
    assert scrape.series("kvps_contributions_total") == {"a w0": 1, "b w0": 1}
    memory = store.client.memory()
    used = scrape.value("kvps_redis_memory_used_bytes")
    assert used
    assert memory[0] / 4 < used < memory[0] * 4
    assert scrape.value("kvps_redis_memory_limit_bytes") == memory[1]
    assert serving.end() == 128 + signal.SIGTERM
    assert not answers(port)


def test_a_taken_port_is_one_line(store: Store) -> None:
    with socket.create_server((HERE, 0)) as taken:
        port = str(taken.getsockname()[1])
        why = f"port {port} of 127.0.0.1 cannot be opened: Address already in use"
        assert refused("metrics", "--port", port, "--redis", store.url, code=1) == f"--port: {why}"
        for command in (["aggregator", "start"], ["worker", "--job", "j"]):
            line = refused(*command, "--metrics-port", port, "--redis", store.url, code=1)
            assert line == f"--metrics-port: {why}"


@pytest.mark.slow
def test_an_aggregator_and_a_worker_serve_them_too(store: Store, start: Any) -> None:
    job = digits_job(store, workers=2, epochs=2_000, worker_timeout_ms=60_000)
    store.create_job("other", model())
    of_aggregator, of_worker = free_port(), free_port()
    redis = ["--redis", store.url]
    started = [
        start("aggregator", "start", *redis, "--metrics-port", str(of_aggregator)),
        start("worker", "--job", job.name, *redis, "--metrics-port", str(of_worker)),
        start("worker", "--job", job.name, *redis),
    ]
    for port, jobs in ((of_aggregator, {"digits", "other"}), (of_worker, {"digits"})):
        assert eventually(lambda port=port: answers(port))
        assert eventually(lambda port=port: min(Scrape.of(port).series("kvps_contributions_total").values() or [0]) > 3)
        scrape = Scrape.of(port)
        assert scrape.jobs() == jobs
        assert scrape.series("kvps_worker_active", job="digits") == {"w0": 1, "w1": 1}
        assert all(value > 0 for value in scrape.series("kvps_worker_pushed_bytes_total", job="digits").values())
        assert scrape.value("kvps_shard_held", job="digits", shard="0") == 1
        assert scrape.value("kvps_job_state", job="digits", state="runs") == 1
    assert [each.end() for each in reversed(started)] == [128 + signal.SIGTERM] * 3
    assert not answers(of_aggregator)
    assert not answers(of_worker)
