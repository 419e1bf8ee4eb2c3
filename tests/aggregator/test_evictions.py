"""A server that deletes keys for want of memory: it is said wherever one of them is missing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import pytest
from helpers.clusters import running_cluster
from helpers.harness import aggregating, await_version, gradient, model, work_on
from helpers.servers import running_server
from helpers.waiting import eventually
from kvps_aggregator import serve
from kvps_aggregator.job_watcher import JobWatcher

import kvps
from kvps.job import Job
from kvps.session.session import Session
from kvps.store import Store

Serving = Callable[[Store, Job], None]
EVICTED = (
    r"the server has evicted [\d,]+ keys? since it was started \(maxmemory-policy \S+\), .*: set maxmemory-policy "
)


@pytest.fixture(scope="module")
def evicting() -> Iterator[str]:
    """A server that has evicted a key, and evicts no more."""
    with running_server() as url:
        with kvps.connect(url) as store:
            store.client.call("SET", "another program's", "x" * 1000)
            evict_all(store.client.call, "noeviction")
        yield url


def evict_all(call: Callable[..., Any], afterwards: str = "allkeys-random") -> None:
    """Have a server evict every key, as one does whose memory is full of other things."""
    for name, value in (("maxmemory-policy", "allkeys-random"), ("maxmemory", "1")):
        call("CONFIG", "SET", name, value)
    assert eventually(lambda: not call("DBSIZE"))
    for name, value in (("maxmemory", "0"), ("maxmemory-policy", afterwards)):
        call("CONFIG", "SET", name, value)


def _fill(job: Job, session: Session) -> None:
    call = job.access.client.twin(0.1).call
    call("CONFIG", "SET", "maxmemory", "1")
    try:
        call("SET", "more", "x")
    finally:
        call("CONFIG", "SET", "maxmemory", "0")


@pytest.mark.parametrize(
    ("missing", "act", "error"),
    [
        ("version", lambda job, session: job.state(), kvps.JobNotFound),
        ("version", lambda job, session: session.push({"x": np.ones(3, np.float32)}), kvps.JobNotFound),
        ("layout", lambda job, session: Job(job.access.client, job.name), kvps.JobNotFound),
        ("workers", lambda job, session: session.pull(), kvps.WorkerEvicted),
        ("config", lambda job, session: job.access.scripts.plan(), kvps.CorruptData),
        ("", lambda job, session: job.snapshot(), kvps.CorruptData),
        ("", _fill, kvps.ServerFull),
    ],
)
def test_an_error_about_what_is_missing_names_the_eviction(
    evicting: str, missing: str, act: Callable[[Job, Session], object], error: type[kvps.KvpsError]
) -> None:
    with kvps.connect(evicting) as store:
        job = store.create_job("job", {"x": np.zeros(3, np.float32)}, transport="redis", worker_timeout_ms=60_000)
        try:
            session = job.join()
            session.pull()
            key = f"kvps:{{job}}:{missing}" if missing else job.access.keys.weights(0, job.state().names[0], 0)
            store.client.call("DEL", key)
            with pytest.raises(error, match=EVICTED):
                act(job, session)
        finally:
            store.client.call("FLUSHALL")


def _one_job(store: Store, job: Job) -> None:
    serve(job, until_finished=False)


def _every_job(store: Store, job: Job) -> None:
    JobWatcher(store, print, print).run()


@pytest.mark.parametrize("serving", [_one_job, _every_job])
@pytest.mark.parametrize("all_keys", [True, False], ids=["every-key", "another-program's"])
def test_an_aggregator_ends_where_its_server_begins_to_evict(
    serving: Serving, all_keys: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Of many keys no script can tell whether they were ever there: what is computed without them would be wrong."""
    with running_server() as url, kvps.connect(url) as store:
        for number in range(1_000):
            store.client.call("SET", f"another program's {number}", "x" * 100)
        with _ends(store, serving):
            evict_all(store.client.call) if all_keys else _evict_some(store, caplog)


@pytest.mark.slow
def test_an_aggregator_ends_where_a_master_of_its_cluster_evicts() -> None:
    with running_cluster(replicas=0) as cluster, kvps.connect(cluster.url) as store, _ends(store, _one_job) as job:
        evict_all(cluster.master_of(job.access.keys.version).ask)


@contextmanager
def _ends(store: Store, serving: Serving) -> Iterator[Job]:
    """Serve a job, whose aggregator must end because of what is done in the block."""
    job = store.create_job("job", model(), transport="redis", worker_timeout_ms=400)
    with ThreadPoolExecutor(1) as pool:
        served = pool.submit(serving, store, job)
        with job.join("w0") as session:
            session.push(gradient(session.pull(), 0, 0))
            await_version(job, 1)
            yield job
            with pytest.raises(kvps.ServerUnfit, match=f"job 'job' cannot go on: {EVICTED}"):
                served.result(60)
            with suppress(kvps.KvpsError):  # the job may be gone
                session.leave()


def _evict_some(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    store.client.call("CONFIG", "SET", "maxmemory-policy", "allkeys-random")
    assert eventually(lambda: "evicts keys when memory is full (maxmemory-policy allkeys-random)" in caplog.text)
    store.client.call("CONFIG", "SET", "maxmemory", store.client.memory()[0] - 1_000)
    assert eventually(lambda: store.client.call("INFO", "stats")["evicted_keys"])
    store.client.call("CONFIG", "SET", "maxmemory", "0")


def test_a_server_that_evicts_only_what_expires_is_accepted_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "kvps.server")
    with running_server("--maxmemory-policy", "volatile-ttl") as url, kvps.connect(url) as store:
        (line,) = caplog.messages
        assert line.endswith("deletes keys with a time to live when memory is full (volatile-ttl): no weights have one")
        job = store.create_job("job", model(), transport="redis")
        with aggregating(job):
            work_on(job, "w0", 1)
            store.client.call("CONFIG", "SET", "maxmemory", "1")
            assert eventually(lambda: store.client.call("INFO", "stats")["evicted_keys"]), "its lease"
            store.client.call("CONFIG", "SET", "maxmemory", "0")
            work_on(job, "w0", 3)
            assert eventually(lambda: job.state().version == 3)
